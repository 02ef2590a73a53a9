"""The two sides of a measurement: what is remembered of their turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evaluator.loading import transfer
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
        answer = {"op": "ran", "stamps": list(range(calls + 1)), "launch_ns": 0, "results": results}
        return Turn(answer, [], round(1e6 * self._spans_ms.pop(0)))


def test_one_turn_that_had_to_wait_does_not_count_for_the_length_of_the_bursts() -> None:
    side = Side("candidate", Spans(4.0, 2.4, 30.0), [], Observed(), call_s=1.0)  # type: ignore[arg-type]
    for calls in (2, 2, 1):
        side.run([SimpleNamespace()] * calls)  # type: ignore[list-item]
    assert (side.quickest_call_s, side.last_call_s) == (0.0012, 0.03)


WANTED = {"fc.weight": ["float32", [8, 4]], "fc.bias": ["float32", [8]]}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (WANTED, {"fc.weight": "fc.weight", "fc.bias": "fc.bias"}),
        ({"own": ["float32", [2]], **WANTED}, {"fc.weight": "fc.weight", "fc.bias": "fc.bias"}),
        ({"w": ["float32", [8, 4]], "b": ["float32", [8]]}, {"fc.weight": "w", "fc.bias": "b"}),
        ({"b": ["float32", [8]], "w": ["float32", [8, 4]]}, {}),
        ({"w": ["float16", [8, 4]], "b": ["float32", [8]]}, {}),
        ({"fc.weight": ["float32", [4, 8]], "fc.bias": ["float32", [8]]}, {"fc.bias": "fc.bias"}),
        ({}, {}),
    ],
)
def test_parameters_are_taken_by_name_or_by_their_order(given: dict[str, Any], names: dict[str, str]) -> None:
    assert transfer(WANTED, given, by_order=True) == names
    by_name = {name: own for name, own in names.items() if own == name}
    assert transfer(WANTED, given, by_order=False) == by_name
