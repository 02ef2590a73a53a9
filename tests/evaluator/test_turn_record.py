"""The raw turns of an evaluation: enough to do its arithmetic again."""

from __future__ import annotations

import math

import pytest

from evaluator import Evaluator, EvaluatorConfig
from evaluator.timing import record
from evaluator.timing.record import TurnRecord
from evaluator.timing.statistics import Pair, estimate
from tasks.records import Candidate, Evaluation
from tasks.suites import load_task

PAIR = Pair(0, "reference_first", 3, 3e6, 2e6, 4e6, 3e6, 5e6, 4e6)


def test_rows_keep_together_whatever_a_device_shows() -> None:
    turns = TurnRecord()
    turns.add("time", PAIR, {})
    turns.add("time", Pair(1, "candidate_first", 3, 3e6, math.nan, spoiled="impossible time"), {"sm_mhz": 1980.0})
    turns.add("confirm", PAIR, {"power_w": 100.0, "other": 1.0})
    assert {len(column) for column in turns.columns.values()} == {3}
    assert turns.columns["candidate_ns"] == [2000000, None, 2000000]
    assert turns.columns["sm_mhz"] == [None, 1980.0, None]
    assert turns.columns["power_w"] == [None, None, 100.0]
    assert turns.columns["step"] == ["time", "time", "confirm"]
    assert "other" not in turns.columns


def test_a_long_timing_keeps_its_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "ROWS_KEPT", 5)
    turns = TurnRecord()
    for _ in range(9):
        turns.add("time", PAIR, {})
    assert {len(column) for column in turns.columns.values()} == {5}


def test_the_estimate_follows_from_the_rows() -> None:
    """Who has the record alone comes to the same speedup, and the record survives JSON."""
    task = load_task("procedural:row_norm/1", size="cpu")
    source = f"{task.source}\nclass ModelNew(Model):\n    pass\n"
    with Evaluator("cpu", EvaluatorConfig()) as evaluator:
        found = evaluator.evaluate(task, Candidate(source=source), confirm=True)
    found = Evaluation.from_json(found.to_json())
    assert set(found.turns["step"]) == {"time", "confirm"}
    measured = found.measurement
    assert measured is not None
    speedups = []
    for step in ("time", "confirm"):
        pairs = pairs_of(found, step)
        assert sum(not pair.spoiled for pair in pairs) >= 8
        speedups.append(estimate(pairs).speedup)
    assert min(abs(speedup / measured.speedup - 1) for speedup in speedups) < 0.03


def pairs_of(found: Evaluation, step: str) -> list[Pair]:
    names = ("placement", "order", "calls", "reference_ns", "candidate_ns", "spoiled")
    rows = zip(found.turns["step"], *(found.turns[name] for name in names), strict=True)
    return [
        Pair(placement, order, calls, reference, candidate, spoiled=spoiled)
        for of, placement, order, calls, reference, candidate, spoiled in rows
        if of == step
    ]
