"""Adds up compared calls into tallies, keeping the first wrong call of each aspect as evidence.

Invariant: the size of the ledger depends on the kinds of calls, never on their number.
"""

from __future__ import annotations

from evaluator.judgement.facts import CallResult, DrawTally

_Key = tuple[str, str, bool]


class CallLedger:
    """Collects `CallResult`s in any order; `tallies()` are the `Facts.draws` of all calls so far."""

    def __init__(self) -> None:
        self._tallies: dict[_Key, DrawTally] = {}

    def add(self, call: CallResult) -> None:
        """Counts one compared call."""
        key = (call.kind, call.step, call.reloaded)
        before = self._tallies.get(key) or DrawTally(kind=call.kind, step=call.step, reloaded=call.reloaded)
        self._tallies[key] = _with_call(before, call)

    def tallies(self) -> tuple[DrawTally, ...]:
        """One tally per kind, step and state of the parameters, in the order of their first calls."""
        return tuple(self._tallies.values())


def _with_call(tally: DrawTally, call: CallResult) -> DrawTally:
    wrong = dict(tally.wrong)
    first = dict(tally.first)
    for aspect in call.aspects:
        wrong[aspect] = wrong.get(aspect, 0) + 1
        first.setdefault(aspect, call)
    return tally.model_copy(
        update={
            "calls": tally.calls + 1,
            "right": tally.right + (not call.aspects),
            "bit_equal": tally.bit_equal + call.bit_equal,
            "half_like": tally.half_like + call.half_like,
            "loose_wrong": tally.loose_wrong + (not call.loose_ok),
            "wrong": wrong,
            "worst_ratio": max(tally.worst_ratio, call.worst_ratio),
            "first": first,
        }
    )
