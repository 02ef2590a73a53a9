"""Figures and alarms of A/A controls by hand, and the history that they make."""

from __future__ import annotations

import math
from typing import Any

import pytest

from evaluator import Evaluator
from evaluator.timing import protocols
from evaluator.timing.controls import ENOUGH, binomial_tail, health, history_of
from evaluator.timing.statistics import PlacementHistory
from tasks.records import Evaluation, Measurement, Task


def control(low: float = 0.98, high: float = 1.02, sd: float = 0.0, placements: int = 5, **more: Any) -> Evaluation:
    timing = Measurement(
        speedup=math.sqrt(low * high), ci_low=low, ci_high=high, reference_ms=1, candidate_ms=1, pairs=20,
        placements=placements,
    )  # fmt: skip
    facts = {"placement_sd_log": sd} if sd else {}
    fields = {"outcome": "accepted", "step": "time", "measurement": timing, "facts": facts, **more}
    return Evaluation(task_id="t", task_hash="h", candidate_hash="c", **fields)


LOST = control(outcome="unscored", reason="device_fault", measurement=None)


def test_the_figures_by_hand() -> None:
    """Three intervals, one of them above 1: a coverage of 2/3; a fourth control failed."""
    found = health([control(0.9, 1.1), control(0.95, 1.05), control(1.01, 1.21), LOST])
    assert (found.measured, found.failed) == (3, 1)
    assert found.coverage == pytest.approx(2 / 3)
    logs = [math.log(0.9 * 1.1) / 2, math.log(0.95 * 1.05) / 2, math.log(1.01 * 1.21) / 2]
    assert found.bias_log == pytest.approx(sum(logs) / 3)
    widths = [math.log(1.1 / 0.9), math.log(1.05 / 0.95), math.log(1.21 / 1.01)]
    assert found.half_width_log == pytest.approx(sum(widths) / 6)
    assert found.alarm == ""


def test_nothing_measured_is_no_alarm() -> None:
    assert (health([]).measured, health([]).alarm) == (0, "")
    assert (health([LOST] * 60).failed, health([LOST] * 60).alarm) == (60, "")


def test_the_tail_by_hand() -> None:
    """Of two tosses: none, at most one, at most two heads. 45 of 50 at 98 %: about 3.2e-3; 44: about 4.8e-4."""
    assert [binomial_tail(k, 2, 0.5) for k in range(3)] == pytest.approx([0.25, 0.75, 1.0])
    assert binomial_tail(45, 50, 0.98) == pytest.approx(0.0032, rel=0.02)
    assert binomial_tail(44, 50, 0.98) == pytest.approx(0.00048, rel=0.02)


@pytest.mark.parametrize(("missed", "count", "alarm"), [
    (0, 50, False), (5, 50, False), (6, 50, True), (6, 49, False), (11, 200, False), (12, 200, True), (50, 50, True),
])  # fmt: skip
def test_coverage_below_its_nominal_value_is_an_alarm_from_fifty_on(missed: int, count: int, alarm: bool) -> None:
    """Misses on both sides alike, so that there is no bias."""
    runs = [control(0.992, 0.999) if n % 2 else control(1.001, 1.008) for n in range(missed)]
    found = health([*runs, *[control()] * (count - missed)], max_bias=0.02)
    assert bool(found.alarm) is alarm
    assert (f"{count - missed} of {count}" in found.alarm) is alarm


@pytest.mark.parametrize(("bias", "limit", "alarm"), [
    (1.012, 0.01, True), (1 / 1.012, 0.01, True), (1.008, 0.01, False), (1.012, 0.02, False),
])  # fmt: skip
def test_a_bias_above_its_limit_is_an_alarm(bias: float, limit: float, alarm: bool) -> None:
    found = health([control(bias * 0.95, bias / 0.95)] * ENOUGH, max_bias=limit)
    assert found.coverage == 1
    assert bool(found.alarm) is alarm
    assert (f"{bias:.3f}x" in found.alarm) is alarm
    assert health([control(bias * 0.95, bias / 0.95)] * (ENOUGH - 1), max_bias=limit).alarm == ""


def test_history_pools_what_accepted_controls_show() -> None:
    """Variances 4e-4 with 4 degrees and 0 with 2: 16e-4 / 6. One placement and what was not accepted say nothing."""
    runs = [control(sd=0.02), control(placements=3), control(sd=0.5, placements=1), LOST]
    assert history_of(runs) == PlacementHistory(pytest.approx(16e-4 / 6), 6)
    assert history_of([LOST]) is None


def test_a_reference_against_itself_is_accepted_and_timed_with_the_history(
    evaluator: Evaluator, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through all processes, first without and then with what earlier controls have shown."""
    seen: list[PlacementHistory | None] = []
    create = protocols.create

    def recording(*arguments: Any, **named: Any) -> Any:
        seen.append(named["history"])
        return create(*arguments, **named)

    monkeypatch.setattr(protocols, "create", recording)
    known = PlacementHistory(1e-6, 50)
    first = evaluator.control(task)
    monkeypatch.setattr(evaluator, "history", known)
    second = evaluator.control(task)
    assert seen == [None, known]
    for result in (first, second):
        assert result.outcome == "accepted", result.message
        assert result.measurement is not None
        assert result.measurement.placements >= 3
    assert health([first, second]).measured == 2
    found = history_of([first, second])
    assert found is not None
    assert found.degrees >= 4
