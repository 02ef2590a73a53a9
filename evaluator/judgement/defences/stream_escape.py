"""Side streams: device work that neither timer waits for and that runs on into the other arm's turn.

Rests on `Facts.timers`: the reference beside the worker against the reference alone, timed before the worker's first
turn; the turn is repeated once before it counts. Yields `stream_escape` for a slow-down beyond twice its error and
beyond 10 %.
"""

from __future__ import annotations

import math

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import Rules
from tasks.figures import times

SLOWDOWN_FLOOR_LOG = math.log(1.10)


def _find(facts: Facts, rules: Rules) -> list[Fault]:  # noqa: ARG001
    seen = facts.timers
    limit = max(SLOWDOWN_FLOOR_LOG, 2 * seen.slowdown_error_log)
    if seen.reference_slowdown_log <= limit:
        return []
    message = (
        f"The reference runs {times(math.exp(seen.reference_slowdown_log))} slower beside this candidate than alone: "
        "work was left running after the call."
    )
    return [Fault("stream_escape", "time", message, seen.model_dump(mode="json"))]


DEFENCE = Defence("stream_escape", "timing lies", ("timers",), _find, yields=("stream_escape",))
