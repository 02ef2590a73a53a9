"""NaN as a wildcard: NaN or Inf where the reference has numbers, or numbers where it has NaN or Inf.

Rests on `Facts.draws`, aspect `masks`: the places of NaN, +Inf and -Inf must be equal. Yields `incorrect`. The budget
is held only where both sides are finite, so that this defence alone stands against a tensor of NaN.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.defences.calls import fault_of, wrong_tallies
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import Rules


def _find(facts: Facts, rules: Rules) -> list[Fault]:
    return [
        fault_of("incorrect", "NaN or Inf at other places", tally, "masks")
        for tally in wrong_tallies(facts, rules, "masks")
    ]


DEFENCE = Defence(
    "nan_masks", "numeric tolerance", ("draws",), _find,
    yields=("incorrect",), softened=("domain", "weights"),
)  # fmt: skip
