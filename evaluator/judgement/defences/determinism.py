"""Races and carried state: the same inputs give another result the second time.

Rests on `Facts.determinism`: inputs repeated with other calls between them, compared under the error budget. Yields
`state_leak` where the reference repeats itself.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import Rules


def _find(facts: Facts, rules: Rules) -> list[Fault]:  # noqa: ARG001
    seen = facts.determinism
    if not seen.differing or not seen.reference_repeats:
        return []
    message = f"The same inputs gave another result in {seen.differing} of {seen.repeats} repetitions."
    return [Fault("state_leak", "check", message, seen.model_dump(mode="json"))]


DEFENCE = Defence(
    "determinism", "races and state", ("determinism",), _find, active="inputs are repeated in the check",
    yields=("state_leak",),
)  # fmt: skip
