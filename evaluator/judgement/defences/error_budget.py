"""Numeric tolerance and precision: answers that pass only because a tolerance is loose.

Rests on `Facts.draws`, aspect `budget`: per tile, in maximum and RMS, against a small multiple of what the declared
precision's own reference errs beside a float64 oracle. Yields `precision_downgrade` when every call is over budget
and none by more than the reference's own half-precision path, else `incorrect`. Aspect `unwritten` (the output
holds the evaluator's poison pattern) is `incorrect` as well. `loose` and `as_given` rules forgive what lies within
1e-2.
"""

from __future__ import annotations

from collections.abc import Sequence

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.defences.calls import binding, fault_of, forgiven_as_loose, wrong_tallies
from evaluator.judgement.facts import DrawTally, Facts
from evaluator.judgement.rules import Rules


def is_precision_downgrade(tallies: Sequence[DrawTally]) -> bool:
    """No call was right, each is over budget, none by more than half precision explains, and nothing else is wrong.

    A candidate that was right before is no downgrade, however small its error: it drifts, or depends on the draw.
    """
    return bool(tallies) and all(
        tally.right == 0 and set(tally.wrong) == {"budget"} and tally.half_like == tally.calls for tally in tallies
    )


def _find(facts: Facts, rules: Rules) -> list[Fault]:
    faults = []
    counting = [tally for tally in facts.draws if binding(tally, rules) and tally.kind != "exact"]
    for tally in wrong_tallies(facts, rules, "budget"):
        if forgiven_as_loose(tally, rules):
            continue
        if is_precision_downgrade(counting):
            what = "Less precise than the task's declared precision"
            faults.append(fault_of("precision_downgrade", what, tally, "budget"))
        else:
            faults.append(fault_of("incorrect", "Wrong value", tally, "budget"))
    for tally in wrong_tallies(facts, rules, "unwritten"):
        faults.append(fault_of("incorrect", "The output was never written", tally, "unwritten"))
    return faults


DEFENCE = Defence(
    "error_budget", "numeric tolerance", ("draws",), _find,
    yields=("precision_downgrade", "incorrect"), softened=("precision", "domain", "weights"),
)  # fmt: skip
