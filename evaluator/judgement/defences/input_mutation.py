"""Changed inputs: a candidate that writes into what it was given, so that both sides agree on less.

Rests on `Facts.inputs_changed` (the expendable copies, compared after each turn with the server's own, outside the
span) and `Facts.buffers_wrong`. Yields `input_mutation`, and `incorrect` for a buffer that the reference updates and
the candidate does not.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import Rules


def _find(facts: Facts, rules: Rules) -> list[Fault]:  # noqa: ARG001
    faults = []
    if facts.inputs_changed:
        names = ", ".join(facts.inputs_changed)
        message = f"The call changed its input ({names}); work on a copy."
        faults.append(Fault("input_mutation", "check", message, {"inputs": list(facts.inputs_changed)}))
    if facts.buffers_wrong:
        names = ", ".join(facts.buffers_wrong)
        message = f"Buffers that the reference updates in a call differ after the candidate's: {names}."
        faults.append(Fault("incorrect", "check", message, {"buffers": list(facts.buffers_wrong)}))
    return faults


DEFENCE = Defence(
    "input_mutation", "input mutation", ("inputs_changed", "buffers_wrong"), _find,
    yields=("input_mutation", "incorrect"),
)  # fmt: skip
