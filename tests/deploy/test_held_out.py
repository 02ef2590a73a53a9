"""Figures of a held-out set by hand, and which tasks may be in one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deploy.cli.session import read_held_out, read_tasks
from deploy.config import load_config
from deploy.graph.events import SampleLeft, event_from_dict, event_to_dict
from deploy.graph.held_out import HeldOutPrompt, measured
from tasks.errors import UsageError

PROMPTS = [HeldOutPrompt("new", "t", "cpu", True), HeldOutPrompt("new", "u", "cpu", True)]


def left(index: int, outcome: Any, speedup: float | None = None, *, name: str = "", **more: Any) -> SampleLeft:
    return SampleLeft(
        sample_id=f"g/{index}", group_id="g", outcome=outcome, speedup=speedup,
        ci_low=None if speedup is None else speedup - 0.1, candidate_hash=name or str(index), **more,
    )  # fmt: skip


SAMPLES = [
    left(0, "accepted", 2.0, name="a"),
    left(1, "accepted", 2.0, name="a"),
    left(2, "accepted", 0.5, name="b", edit_distance=0.1),
    left(3, "accepted", 1.1, name="c", edit_distance=0.3),
    left(4, "accepted", 9.0, name="d", edit_distance=0.0, label="copy"),
    left(5, "rejected"),
    left(6, "unscored"),
    left(7, "cancelled"),
]


@pytest.mark.parametrize(
    ("lower_end", "logs", "above"),
    [(False, 2 * math.log(2.0) + math.log(1.1), 3), (True, 2 * math.log(1.9), 2)],
)
def test_figures_by_hand(lower_end: bool, logs: float, above: int) -> None:
    """Six scored: two equal ones at 2.0, one at 0.5 (counts as 0), one at 1.1 (its lower end is 1.0), a copy and a
    wrong one (0 as well). The unscored and the cancelled count nowhere."""
    event = measured(PROMPTS, SAMPLES, epoch=1, step=3, lower_end=lower_end)
    assert (event.prompts, event.samples, event.unscored, event.copies) == (2, 6, 2, 1)
    assert event.mean_log_speedup == pytest.approx(logs / 6)
    assert event.accepted_share == pytest.approx(4 / 6)
    assert event.above_share == pytest.approx(above / 6)
    assert event.distinct_accepted == 3
    assert event.edit_distance == pytest.approx(0.2)
    assert event_from_dict(event_to_dict(event)) == event


def test_a_set_without_a_scored_sample_has_zeros() -> None:
    event = measured(PROMPTS, SAMPLES[6:], epoch=0, step=0, lower_end=True)
    assert (event.samples, event.unscored, event.mean_log_speedup, event.accepted_share) == (0, 2, 0.0, 0.0)
    assert event.edit_distance is None


def test_a_task_is_trained_on_or_held_out() -> None:
    settings = ["--run.tasks", "procedural:row_norm/0-3", "--held_out.eval_every", "2", "--held_out.sets.new"]
    apart = load_config("demo", [*settings, "procedural:row_norm/4,procedural:row_norm/5"])
    found = read_held_out(apart, read_tasks(apart))
    assert [task.id for task in found["new"]] == ["procedural:row_norm/4", "procedural:row_norm/5"]
    shared = load_config("demo", [*settings, "procedural:row_norm/3-4"])
    with pytest.raises(UsageError, match=r"row_norm/3 of held_out.sets.new is trained on.*take it out"):
        read_held_out(shared, read_tasks(shared))
