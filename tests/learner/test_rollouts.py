"""Groups written beside a run, and read back in the place of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from learner.checkpoint import CheckpointFolder
from learner.config import CheckpointConfig, GrpoConfig, LearnerConfig
from learner.contrastive import TrainItem
from learner.loop import Learner
from learner.rollouts import DumpingStream, RolloutFile, read_groups
from tasks.errors import UsageError
from tasks.records import ScoredGroup


class Stream:
    """A stream with groups to hand out, and some of an earlier life."""

    run_id = "r"

    def __init__(self, pending: Sequence[ScoredGroup], new: Sequence[ScoredGroup]) -> None:
        self.pending, self.new = list(pending), list(new)
        self.acked: list[str] = []

    def fence(self, role: str) -> int:
        return 5

    def claim_all(self, token: int) -> list[tuple[str, ScoredGroup]]:
        return [(f"p{n}", group) for n, group in enumerate(self.pending)]

    def relay(self) -> int:
        return 3

    def read_scored(self, consumer: str, count: int, block_ms: int) -> list[tuple[str, ScoredGroup]]:
        taken, self.new = self.new[:count], self.new[count:]
        return [(group.id, group) for group in taken]

    def ack(self, entry_ids: Sequence[str]) -> int:
        self.acked += entry_ids
        return len(entry_ids)


class Trainer:
    """Remembers which prompts each step had."""

    def __init__(self) -> None:
        self.steps: list[set[tuple[int, ...]]] = []

    def step(self, items: Sequence[TrainItem]) -> dict[str, float]:
        self.steps.append({item.sequence.prompt_ids for item in items})
        return {"loss": 0.0}

    def save(self, folder: Path) -> None:
        (folder / "steps").write_text(str(len(self.steps)))

    def load(self, folder: Path) -> None:
        return None


def group(records: Any, number: int, *, step: int = 0) -> ScoredGroup:
    samples = [
        records.scored(i, records.evaluation(1.0 + i), prompt_id=f"g{number}", step=step) for i in range(2)
    ]  # fmt: skip
    return records.group(samples, group_id=f"g{number}", prompt_ids=(number,))


def test_every_group_is_written_once_whatever_comes_again(records: Any, tmp_path: Path) -> None:
    """Two lives: what is claimed again after a kill is in the file already, a torn line is cut."""
    path, groups = tmp_path / "rollouts.jsonl", [group(records, n) for n in range(5)]
    first = DumpingStream(Stream([], groups[:3]), path)
    assert [entry for entry, _ in first.read_scored("learner", 2, 0)] == ["g0", "g1"]
    assert first.read_scored("learner", 64, 0)[0][1] == groups[2]
    with path.open("a") as file:
        file.write('{"id":"g')
    inner = Stream(groups[1:3], groups[3:])
    second = DumpingStream(inner, path)
    assert [g for _, g in second.claim_all(1)] == groups[1:3]
    second.read_scored("learner", 64, 0)
    assert list(read_groups(path)) == groups
    assert (second.fence("learner"), second.relay(), second.ack(["x"]), inner.acked) == (5, 3, 1, ["x"])


def test_a_file_gives_one_group_for_each_turn_so_that_none_is_too_new(records: Any, tmp_path: Path) -> None:
    """Two groups a step, drawn at steps 0, 0, 1, 1, 2, 2 with no staleness allowed: all are trained on, in order."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(group(records, n, step=n // 2).to_json() + "\n" for n in range(6)))
    config = LearnerConfig(
        grpo=GrpoConfig(groups_per_step=2, max_staleness=0), checkpoint=CheckpointConfig(every_steps=2)
    )

    def begin() -> tuple[Learner, Trainer]:
        trainer = Trainer()
        stream = RolloutFile(path, "r", tmp_path / "starts.txt")
        learner = Learner(config, trainer, stream, CheckpointFolder(tmp_path / "checkpoints", keep=2))
        learner.start()
        return learner, trainer

    learner, trainer = begin()
    stepped = [learner.learn().stepped for _ in range(6)]
    assert stepped == [False, True] * 3
    assert trainer.steps == [{(0,), (1,)}, {(2,), (3,)}, {(4,), (5,)}]
    assert set(learner.standing().fates.values()) == {"trained"}
    assert not learner.learn(partial=True).stepped

    resumed, trainer = begin()
    assert (resumed.standing().epoch, resumed.standing().step) == (1, 2)
    for _ in range(7):
        resumed.learn()
    assert trainer.steps == [{(4,), (5,)}], "what the checkpoint holds is not trained on again"
    assert resumed.standing().step == 3


def test_what_is_no_file_of_groups_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        list(read_groups(tmp_path / "nowhere"))
    (tmp_path / "other").write_text("{}\n")
    with pytest.raises(UsageError, match=r"line 1 of .* is no scored group"):
        list(read_groups(tmp_path / "other"))
