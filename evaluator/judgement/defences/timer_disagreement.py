"""Forged clocks: the worker's own timer claims what the judge's span does not show.

Rests on `Facts.timers`. The span ends when every output of the turn is in the reference server's memory and cannot be
forged; the native timer is precise. Yields `forged_result` when the native speedup exceeds the span's by more than the
span's own error, `timing_escape` when native times are missing or impossible. `limited` caps a speedup that the span
cannot resolve. `alone_cap` caps one that calls show only in company: a candidate that finds the inputs of a whole turn
can do them all in its first call.
"""

from __future__ import annotations

import math

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts, TimerFacts
from evaluator.judgement.rules import Rules
from tasks.figures import times

CALIBRATION_LOG = math.log(1.02)
"""Difference between the two clocks that no claim is cut for."""
DISAGREEMENT_FLOOR_LOG = math.log(1.05)
"""Disagreement that calibration alone explains."""
UNRESOLVED_LOG = 10.0
"""Span error, in log units, where the span cannot tell the candidate's time from its own overhead."""
COMPANY_LOG = math.log(1.10)
"""What a call may gain from the one before it, which leaves its code and weights in the caches."""
ALONE_TURNS = 5
"""Turns of one call that say something."""


def disagrees(seen: TimerFacts) -> bool:
    """Whether the native log speedup is larger than the span allows, over all turns and in the quiet ones alone.

    On a busy machine either arm may have had to wait more often; time that is hidden in every turn shows in the quiet
    ones too. What is hidden in some turns only is not paid, see `limited`.
    """
    gap = seen.native_log - max(seen.span_log, seen.quiet_log)
    return not (gap <= max(DISAGREEMENT_FLOOR_LOG, 2 * seen.span_error_log))


def limited(
    native_log: float, span_log: float, span_error_log: float, *, launched_ahead: bool = False
) -> tuple[float, bool]:  # fmt: skip
    """The log speedup that may be claimed, and whether the span is what limits it.

    Nothing above the span's own interval is paid, and no gain where the span sees no time of the candidate's at all: a
    worker that was taken over can spare the turn's overhead and hide as much work in it. Calls that were launched ahead
    are the exception: there the overhead of a call is longer than most kernels, so that the cap would be noise; clocks
    that disagree are rejected all the same. The span has to resolve a gain: its error must be below a quarter of it,
    else the result is labelled, whether or not it was capped; gains within the calibration are none.
    """
    cap = span_log + max(CALIBRATION_LOG, span_error_log) if span_error_log < UNRESOLVED_LOG else CALIBRATION_LOG
    if launched_ahead:
        cap = math.inf
    unresolved = native_log > CALIBRATION_LOG and span_error_log > native_log / 4
    return min(native_log, cap), unresolved or native_log > cap


def alone_cap(seen: TimerFacts, claimed_log: float) -> float:
    """The log speedup that turns of one call allow: infinite where they agree with the claim or show nothing."""
    if seen.alone_turns < ALONE_TURNS or seen.alone_error_log >= UNRESOLVED_LOG:
        return math.inf
    if claimed_log - seen.alone_log <= max(COMPANY_LOG, 2 * seen.alone_error_log):
        return math.inf
    return seen.alone_log + max(CALIBRATION_LOG, seen.alone_error_log)


def _find(facts: Facts, rules: Rules) -> list[Fault]:  # noqa: ARG001
    seen = facts.timers
    detail = seen.model_dump(mode="json")
    faults = []
    if seen.turns and disagrees(seen):
        message = (
            f"The worker's timer claims {times(math.exp(seen.native_log))}, the judge's own clock shows "
            f"{times(math.exp(seen.span_log))}."
        )
        faults.append(Fault("forged_result", "time", message, detail))
    if seen.missing_turns:
        message = f"The worker's timer gave no possible time in {seen.missing_turns} of {seen.turns} turns."
        faults.append(Fault("timing_escape", "time", message, detail))
    return faults


DEFENCE = Defence("timer_disagreement", "timing lies", ("timers",), _find, yields=("forged_result", "timing_escape"))
