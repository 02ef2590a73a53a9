"""Numeric tolerance and precision: answers that pass only because a tolerance is loose.

Rests on `Facts.draws`, aspect `budget`: per tile, in maximum and RMS, against a small multiple of what the declared
precision's own reference errs beside a float64 oracle. Yields `precision_downgrade` when every call of a kind is over
budget and none by more than the reference's own half-precision path, else `incorrect`. Aspect `unwritten` (the output
holds the evaluator's poison pattern) is `incorrect` as well. `loose` and `as_given` rules forgive what lies within
1e-2.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.defences.calls import fault_of, forgiven_as_loose, wrong_tallies
from evaluator.judgement.facts import DrawTally, Facts
from evaluator.judgement.rules import Rules


def is_precision_downgrade(tally: DrawTally) -> bool:
    """All calls are over budget, none by more than half precision explains, and nothing else is wrong with them."""
    over = tally.wrong.get("budget", 0)
    return over == tally.calls == tally.half_like and set(tally.wrong) == {"budget"}


def _find(facts: Facts, rules: Rules) -> list[Fault]:
    faults = []
    for tally in wrong_tallies(facts, rules, "budget"):
        if forgiven_as_loose(tally, rules):
            continue
        if is_precision_downgrade(tally):
            what = "Less precise than the task's declared precision"
            faults.append(fault_of("precision_downgrade", what, tally, "budget"))
        else:
            faults.append(fault_of("incorrect", "Wrong value", tally, "budget"))
    for tally in wrong_tallies(facts, rules, "unwritten"):
        faults.append(fault_of("incorrect", "The output was never written", tally, "unwritten"))
    return faults


DEFENCE = Defence("error_budget", "numeric tolerance", ("draws",), _find)
