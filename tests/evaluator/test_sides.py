"""The two sides of a measurement: what is remembered of their turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from evaluator.observed import Observed
from evaluator.sides import Side
from evaluator.timing.turns import Turn


class Spans:
    """An arm whose turns take the given times, one after the other."""

    served_s = 0.0

    def __init__(self, *spans_ms: float) -> None:
        self._spans_ms = list(spans_ms)

    def take(self, request: dict[str, Any], timeout_s: float, descriptors: Any = ()) -> Turn:
        calls = len(request["calls"])
        results = [{"structure": "tensor", "leaves": [], "aliases": []}] * calls
        answer = {"op": "ran", "stamps": list(range(calls + 1)), "results": results}
        return Turn(answer, [], round(1e6 * self._spans_ms.pop(0)))


def test_one_turn_that_had_to_wait_does_not_count_for_the_length_of_the_bursts() -> None:
    side = Side("candidate", Spans(4.0, 2.4, 30.0), [], Observed(), call_s=1.0)  # type: ignore[arg-type]
    for calls in (2, 2, 1):
        side.run([SimpleNamespace()] * calls)  # type: ignore[list-item]
    assert (side.quickest_call_s, side.last_call_s) == (0.0012, 0.03)
