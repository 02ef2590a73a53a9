"""Two GRPO steps end to end: a tiny random Llama, fake store and engines; real trainer, checkpoints, publication."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from learner.actor import LearnerProcess
from learner.config import DeepSpeedConfig, GrpoConfig, LearnerConfig, OptimizerConfig, PolicyConfig, PublishConfig
from tasks.records import PolicyVersion, ScoredGroup

pytestmark = pytest.mark.heavy


class Stream:
    """The groups that a run would have scored."""

    run_id = "r"

    def __init__(self) -> None:
        self.new: list[tuple[str, ScoredGroup]] = []
        self.pending: dict[str, ScoredGroup] = {}
        self.acked: list[str] = []
        self.tokens = 0

    def fence(self, role: str) -> int:
        self.tokens += 1
        return self.tokens

    def claim_all(self, token: int) -> list[tuple[str, ScoredGroup]]:
        return list(self.pending.items())

    def relay(self) -> int:
        return 0

    def read_scored(self, consumer: str, count: int, block_ms: int) -> list[tuple[str, ScoredGroup]]:
        taken, self.new = self.new[:count], self.new[count:]
        self.pending.update(taken)
        return taken

    def ack(self, entry_ids: Sequence[str]) -> int:
        self.acked += entry_ids
        return sum(self.pending.pop(entry, None) is not None for entry in entry_ids)


class Remote:
    """Looks like a method of a Ray actor."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Engine:
    """Looks like a generator actor that reads the published file."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.versions: list[PolicyVersion] = []
        self.begin_update = Remote(self._nothing)
        self.load_weights = Remote(self._load)
        self.finish_update = Remote(self._finish)

    async def _nothing(self) -> None:
        return None

    async def _load(self, source: Any) -> None:
        self.tensors = load_file(source.paths[0])

    async def _finish(self, version: PolicyVersion) -> None:
        self.versions.append(version)


def group(records: Any, number: int, step: int) -> ScoredGroup:
    name = f"g{number}"
    samples = [
        records.scored(
            i, records.evaluation(1.0 + i) if i else records.evaluation(reason="incorrect"), prompt_id=name, step=step,
            token_ids=tuple(3 + (7 * number + 5 * i + j) % 60 for j in range(4 + 3 * i)),
            logprobs=(-4.0,) * (4 + 3 * i),
        )
        for i in range(3)
    ]  # fmt: skip
    return records.group(samples, group_id=name, prompt_ids=tuple(range(3, 12)))


def test_two_steps_then_a_restart(records: Any, tiny_model: Path, tmp_path: Path) -> None:
    config = LearnerConfig(
        device="cpu",
        policy=PolicyConfig(model=str(tiny_model), lora_rank=4, dtype="fp32"),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        deepspeed=DeepSpeedConfig(zero_stage=2),
        grpo=GrpoConfig(groups_per_step=2, kl_weight=0.01),
        publish=PublishConfig(folder=str(tmp_path / "shm")),
    )
    stream, engine = Stream(), Engine()

    def process() -> LearnerProcess:
        return LearnerProcess(config, "r", str(tmp_path / "checkpoints"), lambda: stream)

    async def first_life() -> list[dict[str, torch.Tensor]]:
        learner = process()
        await learner.ready()
        published = []
        await learner.publish([engine])
        published.append(engine.tensors)
        for step in range(2):
            stream.new = [(f"{2 * step + n}-0", group(records, 2 * step + n, step)) for n in range(2)]
            learned = await learner.learn()
            assert learned.stepped
            assert learned.standing.step == step + 1
            assert learned.metrics["gradient_norm"] > 0
            await learner.publish([engine])
            published.append(engine.tensors)
        return published

    published = asyncio.run(first_life())
    assert engine.versions == [PolicyVersion(step=n) for n in range(3)]
    assert stream.acked == ["0-0", "1-0", "2-0", "3-0"]
    plain = load_file(tiny_model / "model.safetensors")
    assert all(torch.equal(published[0][name], plain[name]) for name in published[0])
    for earlier, later in itertools.pairwise(published):
        changed = {name for name in later if not torch.equal(earlier[name], later[name])}
        assert changed
        assert all("proj" in name for name in changed), "an adapter changes linear layers alone"

    async def second_life() -> None:
        learner = process()
        standing = await learner.standing()
        assert (standing.epoch, standing.step) == (1, 2)
        assert set(standing.fates.values()) == {"trained"}
        await learner.publish([engine])

    asyncio.run(second_life())
    assert engine.versions[-1] == PolicyVersion(epoch=1, step=2)
    assert all(torch.equal(engine.tensors[name], published[-1][name]) for name in engine.tensors)
