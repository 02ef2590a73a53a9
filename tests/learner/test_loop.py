"""The learner over a fake stream and trainer, with kills at every point where one can fall."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.checkpoint import CheckpointFolder
from learner.config import CheckpointConfig, GrpoConfig, LearnerConfig
from learner.loop import Learner
from learner.sampled import TrainItem
from tasks.records import PolicyVersion, ScoredGroup


class Killed(Exception):
    """The process is gone."""


class Kills:
    """Kills at the given calls of `point`, counted over the whole test."""

    def __init__(self, at: set[int] | None = None) -> None:
        self._at = at or set()
        self.count = 0

    def point(self) -> None:
        self.count += 1
        if self.count in self._at:
            raise Killed


class Stream:
    """A durable stream: groups stay until acked; a new token shuts the earlier holder out."""

    run_id = "r"

    def __init__(self, kills: Kills) -> None:
        self.entries: dict[str, ScoredGroup] = {}
        self.pending: set[str] = set()
        self.acked: list[str] = []
        self.token = 0
        self._kills = kills

    def add(self, group: ScoredGroup) -> None:
        self.entries[f"{len(self.entries) + 1}-0"] = group

    def fence(self, role: str) -> int:
        self.token += 1
        return self.token

    def claim_all(self, token: int) -> list[tuple[str, ScoredGroup]]:
        assert token == self.token
        return [(e, self.entries[e]) for e in sorted(self.pending, key=lambda e: int(e.split("-")[0]))]

    def relay(self) -> int:
        return 0

    def read_scored(self, consumer: str, count: int, block_ms: int) -> list[tuple[str, ScoredGroup]]:
        new = [e for e in self.entries if e not in self.pending and e not in self.acked][:count]
        self.pending.update(new)
        self._kills.point()
        return [(e, self.entries[e]) for e in new]

    def ack(self, entry_ids: Sequence[str]) -> int:
        self._kills.point()
        for entry in entry_ids:
            assert entry in self.pending, "acked without being pending"
            self.pending.discard(entry)
            self.acked.append(entry)
        self._kills.point()
        return len(entry_ids)


class FakeTrainer:
    """Its weights are the list of the steps' inputs: the completions trained on."""

    def __init__(self, kills: Kills) -> None:
        self.weights: list[tuple[int, ...]] = []
        self._kills = kills

    def step(self, items: Sequence[TrainItem]) -> dict[str, float]:
        self._kills.point()
        self.weights += sorted({item.sequence.prompt_ids for item in items})
        self._kills.point()
        return {"loss": 0.0}

    def save(self, folder: Path) -> None:
        self._kills.point()
        (folder / "weights.json").write_text(json.dumps(self.weights))
        self._kills.point()

    def load(self, folder: Path) -> None:
        self.weights = [tuple(ids) for ids in json.loads((folder / "weights.json").read_text())]


def fit(records: Any, number: int, *, step: int = 0) -> ScoredGroup:
    """A group with variance, whose prompt is its number."""
    name = f"g{number}"
    samples = [records.scored(i, records.evaluation(1.0 + i), prompt_id=name, step=step) for i in range(2)]
    return records.group(samples, group_id=name, prompt_ids=(number,))


def unfit(records: Any, number: int) -> ScoredGroup:
    """A group without variance."""
    name = f"g{number}"
    samples = [records.scored(i, records.evaluation(2.0), prompt_id=name) for i in range(2)]
    return records.group(samples, group_id=name, prompt_ids=(number,))


def learner_over(
    stream: Stream, folder: Path, kills: Kills, *, groups_per_step: int = 2, every: int = 1, max_staleness: int = 100
) -> tuple[Learner, FakeTrainer]:
    trainer = FakeTrainer(kills)
    config = LearnerConfig(
        grpo=GrpoConfig(groups_per_step=groups_per_step, max_staleness=max_staleness),
        checkpoint=CheckpointConfig(every_steps=every, keep=2),
    )
    return Learner(config, trainer, stream, CheckpointFolder(folder, keep=2)), trainer


def test_a_step_takes_as_many_groups_as_it_needs_and_the_rest_waits(records: Any, tmp_path: Path) -> None:
    stream = Stream(Kills())
    learner, trainer = learner_over(stream, tmp_path, Kills())
    learner.start()
    for number in range(3):
        stream.add(fit(records, number))
    learned = learner.learn()
    assert learned.stepped
    assert (learned.standing.epoch, learned.standing.step) == (0, 1)
    assert dict(learned.standing.fates) == {"g0": "trained", "g1": "trained"}
    assert stream.acked == ["1-0", "2-0"]
    assert not learner.learn().stepped
    assert learner.learn(partial=True).stepped
    assert trainer.weights == [(0,), (1,), (2,)]
    assert not learner.learn(partial=True).stepped


def test_unfit_groups_leave_at_once_but_are_acked_with_the_next_checkpoint(records: Any, tmp_path: Path) -> None:
    stream = Stream(Kills())
    learner, _ = learner_over(stream, tmp_path, Kills())
    learner.start()
    stream.add(unfit(records, 0))
    learned = learner.learn(partial=True)
    assert not learned.stepped
    assert dict(learned.standing.fates) == {"g0": "zero_variance"}
    assert stream.acked == []
    learner.checkpoint()
    assert stream.acked == ["1-0"]


def test_a_group_may_turn_stale_while_it_waits(records: Any, tmp_path: Path) -> None:
    """Drawn at step 0, bound 1: fit until two steps have passed."""
    stream = Stream(Kills())
    learner, _ = learner_over(stream, tmp_path, Kills(), max_staleness=1, groups_per_step=1)
    learner.start()
    for number in range(3):
        stream.add(fit(records, number))
    fates = [dict(learner.learn().standing.fates) for _ in range(3)][-1]
    assert fates == {"g0": "trained", "g1": "trained", "g2": "stale"}


def test_figures_of_the_groups(records: Any, tmp_path: Path) -> None:
    """Rewards 1 and 2; the second a copy would be 0: here both accepted, none copied, staleness 0."""
    stream = Stream(Kills())
    learner, _ = learner_over(stream, tmp_path, Kills(), groups_per_step=1)
    learner.start()
    stream.add(fit(records, 0))
    figures = learner.learn().metrics
    assert (figures["reward_mean"], figures["reward_max"]) == (1.5, 2.0)
    assert (figures["accepted_share"], figures["copy_share"], figures["samples"]) == (1.0, 0.0, 2.0)


def test_restart_resumes_acks_what_the_checkpoint_has_and_starts_a_new_epoch(records: Any, tmp_path: Path) -> None:
    """Killed after the checkpoint and before the ack: groups 0 and 1 are acked without training, 2 is trained."""
    stream = Stream(Kills())
    for number in range(3):
        stream.add(fit(records, number))
    first, _ = learner_over(stream, tmp_path, Kills())
    first.start()
    stream._kills = Kills({3})  # two reads, the second of them empty, then the ack
    with pytest.raises(Killed):
        first.learn()
    assert stream.acked == []
    stream._kills = Kills()
    second, trainer = learner_over(stream, tmp_path, Kills())
    standing = second.start()
    assert (standing.epoch, standing.step) == (1, 1)
    assert stream.acked == ["1-0", "2-0"]
    assert second.learn(partial=True).standing.version == PolicyVersion(epoch=1, step=2)
    assert trainer.weights == [(0,), (1,), (2,)]


@settings(deadline=None, max_examples=30)
@given(st.sets(st.integers(1, 40), max_size=6), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_each_group_is_in_the_surviving_weights_exactly_once_whatever_is_killed(
    records: Any, tmp_path_factory: Any, at: set[int], groups_per_step: int, every: int, seed: int
) -> None:
    """Kills fall in reads, around steps, within checkpoints and around acks; groups arrive meanwhile."""
    kills, rng = Kills(at), random.Random(seed)
    stream, folder = Stream(kills), tmp_path_factory.mktemp("run")
    groups = [unfit(records, n) if rng.random() < 0.2 else fit(records, n) for n in range(10)]
    epochs: list[int] = []
    while True:
        learner, trainer = learner_over(stream, folder, kills, groups_per_step=groups_per_step, every=every)
        try:
            epochs.append(learner.start().epoch)
            while groups or len(stream.acked) < len(stream.entries):
                for group in groups[: rng.randint(0, 3)]:
                    stream.add(group)
                    groups.remove(group)
                if not learner.learn(partial=not groups).stepped and not groups:
                    learner.checkpoint()
            break
        except Killed:
            continue
    fates = learner.standing().fates
    trained = sorted(name for name, fate in fates.items() if fate == "trained")
    assert len(fates) == 10
    assert sorted(f"g{ids[0]}" for ids in trainer.weights) == trained
    assert len(set(stream.acked)) == len(stream.acked) == 10
    assert epochs == sorted(set(epochs)), "each start that came through has an epoch of its own"
