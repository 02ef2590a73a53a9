"""TensorBoard and W&B beside the run's own files; each test of a package skips where that is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.config import ObserveConfig, load_config
from deploy.folder import RunFolder
from deploy.graph.events import LineageStarted, RunOpened, StepLearned, event_to_dict
from deploy.graph.run import run_plan
from deploy.observe import writers as module
from deploy.observe.follow import Follower
from deploy.observe.writers import Writers, check_writers, open_writers
from tasks.errors import UsageError


class Remembering:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, dict[str, float]]] = []

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self.calls.append(("write", step, dict(figures)))

    def restart(self, step: int) -> None:
        self.calls.append(("restart", step, {}))

    def close(self) -> None:
        self.calls.append(("close", 0, {}))


def test_what_is_no_finite_number_is_left_out() -> None:
    kept = Remembering()
    with Writers([kept]) as opened:
        opened.write(3, {"loss": 0.5, "held_out_loss": None, "norm": float("nan"), "name": "x", "steps": 2})
    assert kept.calls == [("write", 3, {"loss": 0.5, "steps": 2.0}), ("close", 0, {})]


def test_each_step_is_written_once_and_a_lost_lineage_is_taken_back(tmp_path: Path) -> None:
    """A second follower, as after a kill of the command, writes nothing that the first has written."""
    run = RunFolder(tmp_path / "r1").create()
    events: list[dict[str, Any]] = [
        event_to_dict(event)
        for event in (
            RunOpened(run_id="r1"), StepLearned(epoch=0, step=1, metrics={"loss": 1.0}),
            StepLearned(epoch=0, step=2, metrics={"loss": 2.0}), LineageStarted(epoch=1, step=1),
            StepLearned(epoch=1, step=2, metrics={"loss": 3.0}),
        )
    ]  # fmt: skip
    plan = run_plan(load_config("demo"), "r1", [])
    lives = [Remembering(), Remembering()]
    for life, known in zip(lives, (3, 5), strict=True):
        shown = events[:known]
        follower = Follower(run, plan, lambda n, e=shown: e[n:], lambda f: None, writers=Writers([life]))
        follower.catch_up()
    assert lives[0].calls == [("write", 1, {"loss": 1.0}), ("write", 2, {"loss": 2.0})]
    assert lives[1].calls == [("restart", 1, {}), ("write", 2, {"loss": 3.0})]


@pytest.mark.parametrize(("settings", "said"), [
    ({"tensorboard": True}, "observe.tensorboard needs the package tensorboard.*pip install tensorboard"),
    ({"wandb": "offline"}, "observe.wandb needs the package wandb.*or set observe.wandb to off"),
])  # fmt: skip
def test_a_missing_package_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=said):
        check_writers(ObserveConfig(**settings))
    check_writers(ObserveConfig())


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_what_was_written_and_hides_what_was_taken_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_writers(ObserveConfig(tensorboard=True), tmp_path, "r1", {}) as opened:
        opened.write(1, {"loss": 1.0})
        opened.write(2, {"loss": 2.0})
        opened.restart(1)
        opened.write(2, {"loss": 3.0})
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 1.0), (2, 3.0)]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_writes_an_offline_run_into_the_folder(tmp_path: Path) -> None:
    with open_writers(ObserveConfig(wandb="offline"), tmp_path, "r1", {"learner": {"steps": 2}}) as opened:
        opened.write(1, {"loss": 1.0})
        opened.restart(0)
        opened.write(1, {"loss": 2.0})
    (written,) = tmp_path.rglob("run-r1.wandb")
    assert written.stat().st_size > 0
    assert b"loss" in written.read_bytes()
