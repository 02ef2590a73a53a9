from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from learner.batch import TokenSequence
from learner.checkpoint import CheckpointFolder
from learner.config import DeepSpeedConfig, OptimizerConfig, PolicyConfig, SftConfig, SftDataConfig
from learner.engine import PolicyTrainer
from learner.policy import load_policy
from learner.sft import SftCheckpoints, SftReport, layout, train
from learner.sft_data import SftPair
from tasks.errors import UsageError

pytestmark = pytest.mark.heavy


def pairs(count: int, first: int = 0) -> list[SftPair]:
    """The completion repeats the prompt's first token: something that can be learnt."""
    made = []
    for number in range(first, first + count):
        token = 3 + number % 5
        sequence = TokenSequence((token, 50, 51, 52), (token,) * (2 + number % 3) + (2,))
        made.append(SftPair(sequence, f"t/{number}", (), "seed", "slow", 0))
    return made


def trainer(folder: Path) -> PolicyTrainer:
    """Trains every weight: the frozen output layer of a random model would leave an adapter little to reach."""
    policy = load_policy(PolicyConfig(model=str(folder), dtype="fp32", lora_rank=0))
    schedule = OptimizerConfig(learning_rate=2e-2, decay="cosine")
    return PolicyTrainer(policy, schedule, DeepSpeedConfig(zero_stage=1), device="cpu")


def config(steps: int, **kinds: float) -> SftConfig:
    return SftConfig(batch=8, steps=steps, held_out_every=10, data=SftDataConfig(seed=1), **kinds)


def test_the_loss_falls_on_held_out_pairs_too_and_the_curve_is_written(tiny_model: Path, tmp_path: Path) -> None:
    """Before training the loss is about ln 64 = 4.16 per token."""
    run = trainer(tiny_model)
    report = train(run, pairs(40), pairs(5, first=40), config(30), tmp_path, row_tokens=40)
    assert report.first_loss == pytest.approx(math.log(64), abs=0.3)
    assert report.last_loss < 0.5 * report.first_loss
    assert report.held_out_loss is not None
    assert report.held_out_loss < 0.6 * report.first_loss
    assert report.held_out_perplexity == pytest.approx(math.exp(report.held_out_loss))
    lines = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(30))
    assert [line["step"] for line in lines if line["held_out_loss"] is not None] == [9, 19, 29]
    assert lines[-1]["learning_rate"] < 0.01 * lines[0]["learning_rate"]
    run.close()


def test_two_runs_with_one_seed_are_equal_and_layout_does_not_matter(tiny_model: Path, tmp_path: Path) -> None:
    losses = []
    for number, row_tokens in enumerate((1000, 1000, 16)):
        run = trainer(tiny_model)
        losses.append(train(run, pairs(40), [], config(4), tmp_path / str(number), row_tokens=row_tokens).last_loss)
        run.close()
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_minutes_end_the_run_and_the_learning_rate_with_it(tiny_model: Path, tmp_path: Path) -> None:
    """A clock that moves 1 s at each look, one minute allowed: the run ends between 10 and 60 steps, rate near 0."""
    now = iter(range(10**6))
    run = trainer(tiny_model)
    report = train(
        run, pairs(40), [], config(10_000, minutes=1.0), tmp_path, row_tokens=1000, clock=lambda: float(next(now))
    )
    lines = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert 10 <= report.steps <= 60
    assert lines[-1]["learning_rate"] < 0.1 * lines[0]["learning_rate"]
    run.close()


def test_pairs_over_the_limit_are_left_out_and_counted(tiny_model: Path, tmp_path: Path) -> None:
    run = trainer(tiny_model)
    limited = SftConfig(batch=4, steps=1, max_tokens=16)
    long = [SftPair(TokenSequence((3,) * 20, (4, 2)), "t/long", (), "seed", "slow", 0)]
    report = train(run, pairs(8) + long, [], limited, tmp_path, row_tokens=1000)
    assert (report.pairs, report.left_out) == (8, 1)
    run.close()


def test_layouts_of_both_devices_hold_every_target_once() -> None:
    sequences = [pair.sequence for pair in pairs(9)]
    wanted = sorted(token for s in sequences for token in s.completion_ids)
    for device in ("cpu", "cuda"):
        batches = layout(sequences, 30, device)
        assert sorted(token for b in batches for token in b.target_n.tolist()) == wanted
    assert all(batch.segments is None for batch in layout(sequences, 30, "cuda"))
    assert layout([], 30, "cpu") == []


class Killed(Exception):
    """The process is gone."""


@pytest.mark.parametrize("killed_after", [1, 3, 5, 6])
def test_a_killed_run_goes_on_as_if_it_had_never_been_stopped(
    tiny_model: Path, tmp_path: Path, killed_after: int
) -> None:
    """Six steps, a checkpoint every second: killed after a step, with the curve written beyond the checkpoint; the
    resumed run ends with the same weights, the same curve and the same held-out loss to the bit."""

    def six(folder: Path, clock: Callable[[], float] = time.monotonic) -> tuple[SftReport, dict[str, torch.Tensor]]:
        run = trainer(tiny_model)
        limited = SftConfig(batch=8, steps=6, held_out_every=2, checkpoint_every=2, data=SftDataConfig(seed=1))
        kept = SftCheckpoints(CheckpointFolder(folder / "checkpoints", keep=2), "r")
        try:
            report = train(
                run, pairs(40), pairs(5, first=40), limited, folder, row_tokens=40, checkpoints=kept, clock=clock
            )
            return report, {name: p.detach().clone() for name, p in run.policy.named_parameters()}
        finally:
            run.close()

    whole, weights = six(tmp_path / "whole")
    folder = tmp_path / "killed"

    def clock() -> float:
        curve = folder / "sft.jsonl"
        if curve.is_file() and len(curve.read_text().splitlines()) == killed_after:
            raise Killed
        return 0.0

    with pytest.raises(Killed):
        six(folder, clock)
    resumed, again = six(folder)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert (resumed.last_loss, resumed.first_loss, resumed.held_out_loss) == (
        whole.last_loss, whole.first_loss, whole.held_out_loss,
    )  # fmt: skip
    curves = [
        [(line["step"], line["loss"]) for line in map(json.loads, (f / "sft.jsonl").read_text().splitlines())]
        for f in (tmp_path / "whole", folder)
    ]
    assert curves[0] == curves[1]


def test_nothing_to_train_on_is_said(tiny_model: Path, tmp_path: Path) -> None:
    run = trainer(tiny_model)
    long = [SftPair(TokenSequence((3,) * 20, (4, 2)), "t/long", (), "seed", "slow", 0)]
    with pytest.raises(UsageError, match="raise it, or give other data"):
        train(run, long, [], SftConfig(batch=4, steps=1, max_tokens=16), tmp_path, row_tokens=40)
    run.close()


def test_packing_can_be_asked_for_on_a_gpu() -> None:
    sequences = [pair.sequence for pair in pairs(9)]
    assert all(batch.segments is not None for batch in layout(sequences, 30, "cuda", "pack"))
    assert all(batch.segments is None for batch in layout(sequences, 30, "cpu", "pad"))
