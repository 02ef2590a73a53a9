"""Replay: the answer of an earlier call, kept by address, shape, fingerprint, file or call count.

Every call has fresh secret inputs, at addresses that repeat and at new ones. Rests on `Facts.draws`, aspect `stale`: a
wrong output that is right for an earlier call's inputs or parameters, or bit-equal to an earlier output. Yields
`caching`.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.defences.calls import fault_of, wrong_tallies
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import Rules


def _find(facts: Facts, rules: Rules) -> list[Fault]:
    return [
        fault_of("caching", "The answer of an earlier call was returned", tally, "stale")
        for tally in wrong_tallies(facts, rules, "stale")
    ]


DEFENCE = Defence(
    "stale_result", "replay and caching", ("draws",), _find, active="fresh inputs for every timed call",
    yields=("caching",), softened=("domain", "weights"),
)  # fmt: skip
