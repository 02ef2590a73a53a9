"""Whether an evaluation is as its case declares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.records import Evaluation, Measurement
from tasks.redteam import departure, selected

ACCEPT = {"expect": "accept", "reason": None, "also_ok": []}
REJECT = {"expect": "reject", "reason": "caching", "also_ok": ["aliasing"]}


def found(outcome: str, reason: str | None = None, speedup: float = 2.0, ci_low: float = 1.9) -> Evaluation:
    measurement = Measurement(
        speedup=speedup, ci_low=ci_low, ci_high=2.1, reference_ms=1.0, candidate_ms=0.5, pairs=20
    )  # fmt: skip
    return Evaluation(
        outcome=outcome, reason=reason, step="time", message="What happened.", task_id="t", task_hash="h",  # type: ignore[arg-type]
        candidate_hash="c", measurement=measurement if outcome == "accepted" else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("case", "evaluation", "says"),
    [
        (ACCEPT, found("accepted"), ""),
        (ACCEPT, found("rejected", "caching"), "to be accepted, is rejected caching"),
        (ACCEPT, found("unscored", "device_fault"), "to be accepted, is unscored device_fault"),
        (REJECT, found("rejected", "caching"), ""),
        (REJECT, found("rejected", "aliasing"), ""),
        (REJECT, found("rejected", "crash"), "as caching, is rejected crash: What happened."),
        (REJECT, found("unscored", "evaluator_lost"), "is unscored evaluator_lost"),
        (REJECT, found("accepted", speedup=1.01), "is accepted at 1.01"),
        ({**REJECT, "neutral_speedup_max": 1.15}, found("accepted", speedup=1.1), ""),
        ({**REJECT, "neutral_speedup_max": 1.15}, found("accepted", speedup=1.2), "is accepted at 1.2"),
        ({**REJECT, "neutral_speedup_max": None}, found("accepted"), "is accepted at 2"),
        ({**ACCEPT, "ci_low_max": 1.95}, found("accepted"), ""),
        ({**ACCEPT, "ci_low_max": 1.5}, found("accepted"), "to begin at 1.5 at most, begins at 1.9"),
        ({"expect": "reject", "reason": "caching"}, found("rejected", "caching"), ""),
    ],
)
def test_a_departure_is_said_in_words(case: dict[str, Any], evaluation: Evaluation, says: str) -> None:
    told = departure(case, evaluation)
    assert says in told
    assert bool(told) == bool(says)


def test_cases_are_chosen_by_what_they_need(tmp_path: Path) -> None:
    for name, needs in (("b", "cpu"), ("a", ["cpu"]), ("c", "cuda"), ("d", ["cpu", "nvcc"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "case.json").write_text(json.dumps({**REJECT, "needs": needs}))
    assert [folder.name for folder, _ in selected(tmp_path, "cpu")] == ["a", "b"]
    assert [folder.name for folder, _ in selected(tmp_path, "cuda:1")] == ["c", "d"]
