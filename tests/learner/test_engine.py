"""DeepSpeed on CPU: the gradient of a step does not depend on how the step is split."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.batch import TokenSequence
from learner.config import DeepSpeedConfig, GrpoConfig, OptimizerConfig, PolicyConfig
from learner.contrastive import grpo_step
from learner.engine import PolicyTrainer, learning_rate
from learner.errors import CheckpointError
from learner.policy import load_policy
from learner.reference import FrozenWeights
from learner.sampled import TrainItem

pytestmark = pytest.mark.heavy

RANK_PROGRAM = """
import json, sys
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads(1)
from tests.learner import test_engine as shared
print("RESULT " + json.dumps(shared.steps_of(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]),
                                             address=sys.argv[5], aggregation=sys.argv[6])))
"""
ROOT = Path(__file__).resolve().parent.parent.parent


def items() -> list[TrainItem]:
    """Nine samples of two prompts, of uneven lengths, with advantages and the sampler's log-probabilities."""
    rng = random.Random(5)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 64) for _ in range(length))

    prompts = [draw(6), draw(4)]
    lengths = (3, 8, 1, 5, 9, 2, 7, 4, 6)
    return [
        TrainItem(
            TokenSequence(prompts[i // 5], draw(n)), tuple(-4.0 - 0.1 * j for j in range(n)), rng.uniform(-1.5, 1.5)
        )
        for i, n in enumerate(lengths)
    ]


def steps_of(
    folder: str, stage: int, rank: int, world: int, *, row_tokens: int = 1000, address: str = "", count: int = 2,
    aggregation: str = "token", lora_rank: int = 0, dtype: str = "fp32",
) -> dict[str, Any]:  # fmt: skip
    """Gradient norms and losses of `count` steps, and a digest of the weights after them."""
    from learner.engine import join_process_group

    join_process_group("cpu", rank=rank, world=world, address=address, timeout_s=120)
    policy = load_policy(PolicyConfig(model=folder, dtype=dtype, lora_rank=lora_rank))
    trainer = PolicyTrainer(
        policy, OptimizerConfig(learning_rate=1e-2, max_gradient_norm=0.0), DeepSpeedConfig(zero_stage=stage)
    )
    figures = [
        grpo_step(trainer, items(), GrpoConfig(aggregation=aggregation), row_tokens=row_tokens) for _ in range(count)
    ]
    weights = full_weights(trainer)
    trainer.close()
    return {
        "norms": [f["gradient_norm"] for f in figures],
        "losses": [f["loss"] for f in figures],
        "weights": [float(w.double().sum()) for w in weights] + [float(w.double().abs().sum()) for w in weights],
    }


def full_weights(trainer: PolicyTrainer) -> list[torch.Tensor]:
    import deepspeed

    parameters = [p for p in trainer.policy.parameters() if p.requires_grad]
    with deepspeed.zero.GatheredParameters(parameters):
        return [p.detach().clone() for p in parameters]


def assert_same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 2e-4) -> None:
    for name in ("norms", "losses", "weights"):
        torch.testing.assert_close(
            torch.tensor(one[name]),
            torch.tensor(other[name]),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: n + m,
        )


@pytest.fixture(scope="module")
def whole(tiny_model: Path) -> dict[str, Any]:
    """ZeRO 0, one rank, one micro-batch: what every other way must equal."""
    return steps_of(str(tiny_model), 0, 0, 1)


def test_a_step_has_a_gradient(whole: dict[str, Any]) -> None:
    assert all(norm > 1e-3 for norm in whole["norms"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("row_tokens", [1000, 20])
def test_micro_batches_and_zero_stages_give_the_same_step(
    tiny_model: Path, whole: dict[str, Any], stage: int, row_tokens: int
) -> None:
    assert_same(steps_of(str(tiny_model), stage, 0, 1, row_tokens=row_tokens), whole)


def test_sequence_aggregation_is_split_invariant_too(tiny_model: Path) -> None:
    one = steps_of(str(tiny_model), 1, 0, 1, aggregation="sequence")
    assert_same(steps_of(str(tiny_model), 1, 0, 1, aggregation="sequence", row_tokens=20), one)


def test_bf16_with_an_adapter_steps_under_every_stage_that_has_masters(tiny_model: Path) -> None:
    norms = [steps_of(str(tiny_model), s, 0, 1, lora_rank=4, dtype="bf16", row_tokens=20)["norms"] for s in (0, 1, 2)]
    for other in norms[1:]:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(norms[0]), rtol=0.1, atol=1e-3)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_two_ranks_give_the_same_step_as_one(
    tiny_model: Path, whole: dict[str, Any], stage: int, free_port: int
) -> None:
    """Nine samples over two ranks: four and five, so that one of them has a micro-batch more."""
    program = RANK_PROGRAM.format(root=str(ROOT))
    address = f"127.0.0.1:{free_port}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tiny_model), str(stage), str(rank), "2", address, "token"],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        line = next(line for line in output.splitlines() if line.startswith("RESULT "))
        assert_same(json.loads(line.removeprefix("RESULT ")), whole)


def test_a_step_without_anything_to_train_on_still_runs_and_changes_nothing(tiny_model: Path) -> None:
    policy = load_policy(PolicyConfig(model=str(tiny_model), dtype="fp32", lora_rank=0))
    trainer = PolicyTrainer(policy, OptimizerConfig(learning_rate=1e-2), DeepSpeedConfig(zero_stage=1))
    before = full_weights(trainer)
    report = trainer.step([], lambda logprobs, _entropy, _number: logprobs.sum())
    assert (report.micro_batches, report.gradient_norm) == (1, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, full_weights(trainer), strict=True))
    trainer.close()


def test_several_updates_clip_against_the_first_policy(tiny_model: Path) -> None:
    """The third update sees ratios away from 1, some beyond the clip; a single one sees 1 everywhere."""
    figures = []
    for updates in (1, 3):
        policy = load_policy(PolicyConfig(model=str(tiny_model), dtype="fp32", lora_rank=0))
        trainer = PolicyTrainer(policy, OptimizerConfig(learning_rate=5e-3), DeepSpeedConfig(zero_stage=1))
        figures.append(grpo_step(trainer, items(), GrpoConfig(updates_per_batch=updates), row_tokens=1000))
        trainer.close()
    once, thrice = figures
    assert (once["ratio_mean"], once["clipped_low_share"] + once["clipped_high_share"]) == (1.0, 0.0)
    assert thrice["ratio_mean"] != 1.0
    assert thrice["clipped_low_share"] + thrice["clipped_high_share"] > 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_reference_stays_what_the_run_began_with(tiny_model: Path, stage: int) -> None:
    """KL to the reference is 0 at first, above it after a step, and the step's weights are not disturbed by it."""
    weights = []
    for kl_weight in (1e-9, 0.0):
        policy = load_policy(PolicyConfig(model=str(tiny_model), dtype="fp32", lora_rank=4))
        trainer = PolicyTrainer(policy, OptimizerConfig(learning_rate=1e-2), DeepSpeedConfig(zero_stage=stage))
        reference = FrozenWeights(trainer.policy)
        config = GrpoConfig(kl_weight=kl_weight)
        kls = [grpo_step(trainer, items(), config, row_tokens=1000, reference=reference)["kl"] for _ in range(3)]
        if kl_weight:
            assert kls[0] == pytest.approx(0.0, abs=1e-9)
            assert kls[2] > kls[1] > 1e-7
        weights.append(full_weights(trainer))
        trainer.close()
    for with_reference, without in zip(*weights, strict=True):
        torch.testing.assert_close(with_reference, without, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_resumed_trainer_goes_on_as_the_one_that_never_stopped(tiny_model: Path, tmp_path: Path, stage: int) -> None:
    """Three steps at once against one step, a checkpoint, a new trainer and two steps: with an adapter, bit for bit."""

    def fresh() -> PolicyTrainer:
        policy = load_policy(PolicyConfig(model=str(tiny_model), dtype="fp32", lora_rank=4))
        return PolicyTrainer(policy, OptimizerConfig(learning_rate=1e-2), DeepSpeedConfig(zero_stage=stage))

    def go(trainer: PolicyTrainer, steps: int) -> None:
        for _ in range(steps):
            grpo_step(trainer, items(), GrpoConfig(), row_tokens=1000)

    through, first, second = fresh(), fresh(), fresh()
    go(through, 3)
    go(first, 1)
    first.save(tmp_path)
    torch.manual_seed(99)
    random.seed(99)
    second.load(tmp_path)
    assert second.steps_done == 1
    drawn = (torch.rand(1).item(), random.random())
    second.load(tmp_path)
    assert drawn == (torch.rand(1).item(), random.random())
    go(second, 2)
    for one, other in zip(full_weights(through), full_weights(second), strict=True):
        assert torch.equal(one, other)
    for trainer in (through, first, second):
        trainer.close()


def test_shards_of_another_stage_are_refused_with_the_remedy(tiny_model: Path, tmp_path: Path) -> None:
    def fresh(stage: int) -> PolicyTrainer:
        policy = load_policy(PolicyConfig(model=str(tiny_model), dtype="fp32", lora_rank=4))
        return PolicyTrainer(policy, OptimizerConfig(), DeepSpeedConfig(zero_stage=stage))

    one, two = fresh(1), fresh(2)
    with pytest.raises(CheckpointError, match="other ranks"):
        two.load(tmp_path)
    one.save(tmp_path)
    with pytest.raises(CheckpointError, match="ZeRO 1 on 1 ranks, and this learner has ZeRO 2"):
        two.load(tmp_path)
    for trainer in (one, two):
        trainer.close()


def test_learning_rate_by_hand() -> None:
    """Peak 1, three warm-up steps: 1/4, 2/4, 3/4, then 1; half-way through a cosine 0.5, at its end 0."""
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=3, decay="cosine")
    assert [learning_rate(config, step, 0.0) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(config, 10, 0.5) == pytest.approx(0.5)
    assert learning_rate(config, 10, 1.0) == pytest.approx(0.0)
    assert learning_rate(OptimizerConfig(learning_rate=1.0, decay="linear"), 9, 0.25) == 0.75
