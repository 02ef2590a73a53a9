"""Stage 2's arithmetic against hand-worked numbers and finite differences, and its step on a real trainer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.batch import TokenSequence
from learner.config import DeepSpeedConfig, OptimizerConfig, PolicyConfig, SelfSupervisedConfig
from learner.errors import NotFiniteError
from learner.reinforce import reinforce_loss
from learner.sampled import TrainItem

PLAIN = SelfSupervisedConfig()


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_loss_and_gradient_by_hand() -> None:
    """Log-probabilities -1, -2, -3 of a success (two tokens) and a failure (one), each with weight 1/3.

    Loss (1 + 2) / 3 = 1; gradient -1/3, -1/3, and 0 for the failure: there is no baseline that could punish it.
    """
    logprobs = f64(-1, -2, -3).requires_grad_()
    result = reinforce_loss(logprobs, f64(1, 1, 0), f64(*[1 / 3] * 3), PLAIN)
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(1.0)
    torch.testing.assert_close(logprobs.grad, f64(-1 / 3, -1 / 3, 0.0))


def test_correction_by_hand() -> None:
    """Probabilities 0.5, 0.5; the sampler's 0.25 and 0.1: ratios 2 and 5, the second capped at 2.

    Loss 2 x 0.5 x ln 2 + 2 x 0.5 x ln 2 = 2 ln 2; mismatch ln 2 + ln 5; k3 of both: 2 - ln 2 - 1, 5 - ln 5 - 1.
    """
    result = reinforce_loss(
        f64(0.5, 0.5).log(), f64(1, 1), f64(0.5, 0.5), PLAIN, sampler_logprobs_n=f64(0.25, 0.1).log()
    )
    assert float(result.loss) == pytest.approx(2 * math.log(2))
    assert result.correction_cut == 1
    assert result.mismatch_sum == pytest.approx(math.log(10))
    assert result.mismatch_kl_sum == pytest.approx(5 - math.log(10))


@pytest.mark.parametrize("correction", ["truncated", "masked", "sequence_masked", "none"])
def test_gradient_equals_finite_differences(correction: str) -> None:
    """Central differences in float64 with the importance weights held fixed, as their gradient is stopped."""
    torch.manual_seed(0)
    config = SelfSupervisedConfig(correction=correction, correction_floor=0.1, correction_cap=4.0)
    point, sampler = (-torch.rand(5, dtype=torch.float64) - 0.2 for _ in range(2))
    rewards, weights = f64(1, 1, 1, 1, 0), torch.rand(5, dtype=torch.float64) + 0.1
    at = point.clone().requires_grad_()
    reinforce_loss(at, rewards, weights, config, lengths=[3, 2], sampler_logprobs_n=sampler).loss.backward()
    assert at.grad is not None
    assert float(at.grad[:4].abs().min()) > 1e-3
    # The same weights at every point: the ratio that the loss sees is that of the unmoved policy.
    fixed = (point - sampler).exp() if correction != "none" else torch.ones(5, dtype=torch.float64)

    def value(logprobs: torch.Tensor) -> float:
        none = SelfSupervisedConfig(correction="none")
        return float(reinforce_loss(logprobs, rewards * fixed, weights, none).loss)

    for i in range(5):
        step = torch.zeros(5, dtype=torch.float64)
        step[i] = 1e-6
        assert float(at.grad[i]) == pytest.approx((value(point + step) - value(point - step)) / 2e-6, abs=1e-8)


@settings(deadline=None)
@given(st.permutations(range(6)), st.integers(1, 5))
def test_loss_does_not_depend_on_order_or_split(order: list[int], cut: int) -> None:
    torch.manual_seed(1)
    logprobs, sampler = (-torch.rand(6, dtype=torch.float64) for _ in range(2))
    rewards, weights = f64(1, 0, 1, 1, 0, 1), torch.rand(6, dtype=torch.float64)

    def part(index: list[int]) -> float:
        sampled = sampler[index]
        return float(
            reinforce_loss(logprobs[index], rewards[index], weights[index], PLAIN, sampler_logprobs_n=sampled).loss
        )

    whole = part(list(range(6)))
    assert part(order) == pytest.approx(whole)
    assert part(order[:cut]) + part(order[cut:]) == pytest.approx(whole)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_log_probability_stops_the_step(broken: float) -> None:
    with pytest.raises(NotFiniteError, match="sampler"):
        reinforce_loss(f64(-1.0), f64(1.0), f64(1.0), PLAIN, sampler_logprobs_n=f64(broken))


@pytest.mark.heavy
def test_a_step_computes_successes_alone_and_averages_over_all(tiny_model: Path) -> None:
    """Two successes of 2 tokens and a failure of 4: the loss is that of the successes alone times 4 / 8, and the
    failure's tokens are in no batch."""
    from learner.engine import PolicyTrainer
    from learner.policy import load_policy
    from learner.self_supervised import reinforce_step

    def item(tokens: tuple[int, ...], reward: float) -> TrainItem:
        return TrainItem(TokenSequence((3, 4, 5), tokens), (), reward)

    kept = [item((7, 8), 1.0), item((9, 10), 1.0)]
    figures = []
    for items in (kept, [*kept, item((11, 12, 13, 14), 0.0)]):
        policy = load_policy(PolicyConfig(model=str(tiny_model), lora_rank=0, dtype="fp32"))
        trainer = PolicyTrainer(policy, OptimizerConfig(learning_rate=1e-2, max_gradient_norm=0), DeepSpeedConfig())
        figures.append(reinforce_step(trainer, items, PLAIN, row_tokens=1000))
        trainer.close()
    alone, together = figures
    assert together["loss"] == pytest.approx(alone["loss"] / 2, rel=1e-5)
    assert together["gradient_norm"] == pytest.approx(alone["gradient_norm"] / 2, rel=1e-4)
    assert together["computed_tokens"] == alone["computed_tokens"]
    assert (alone["kept_share"], together["kept_share"]) == (1.0, pytest.approx(2 / 3))
