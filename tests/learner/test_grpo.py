from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config import GrpoConfig
from learner.errors import NotFiniteError
from learner.grpo import GrpoLoss, group_advantages, grpo_loss, token_weights
from learner.importance import k3
from learner.moments import RewardMoments

PLAIN = GrpoConfig(smoothing="none")


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_paper_advantages_without_smoothing() -> None:
    """Rewards 0, 1, 2, 3: mean 1.5, population variance (2.25 + 0.25 + 0.25 + 2.25) / 4 = 1.25, deviation 1.118034.

    Advantages -1.5, -0.5, 0.5, 1.5 over 1.118034 = -1.341641, -0.447214, 0.447214, 1.341641.
    """
    expected = f64(-1.3416407865, -0.4472135955, 0.4472135955, 1.3416407865)
    torch.testing.assert_close(group_advantages(f64(0, 1, 2, 3), PLAIN), expected)


def test_smoothing_clips_an_outlier_and_eq_4_follows() -> None:
    """Rewards 0, 0, 0, 0, 10: mean 2, variance (4 x 4 + 64) / 5 = 16, deviation 4; normalised -0.5 (x4) and 2.0.

    Clipped to 1.5: -0.5 (x4), 1.5; mean -0.1, deviations -0.4 (x4), 1.6, variance (4 x 0.16 + 2.56) / 5 = 0.64,
    deviation 0.8: advantages -0.5 (x4), 2.0.
    """
    torch.testing.assert_close(group_advantages(f64(0, 0, 0, 0, 10), GrpoConfig()), f64(-0.5, -0.5, -0.5, -0.5, 2.0))


def test_smoothing_with_the_deviation_of_the_run() -> None:
    """Run: mean 1, deviation 2. Rewards 1, 9 become 0 and 4, clipped to 1.5; without a scale: -0.75, 0.75."""
    moments = RewardMoments(count=4, mean=1.0, squares=16.0)
    config = GrpoConfig(smoothing="running", scale="none")
    torch.testing.assert_close(group_advantages(f64(1, 9), config, moments), f64(-0.75, 0.75))


def test_no_std_keeps_the_rewards_scale() -> None:
    config = GrpoConfig(smoothing="none", scale="none")
    torch.testing.assert_close(group_advantages(f64(1.0, 1.02), config), f64(-0.01, 0.01))


@pytest.mark.parametrize("smoothing", ["none", "group"])
def test_std_floor_keeps_timing_noise_small_with_and_without_smoothing(smoothing: str) -> None:
    """Rewards 1.00, 1.02: deviation 0.01, floor 0.1: +-0.01 / 0.1 = +-0.1. A wide group is not touched by the floor."""
    config = GrpoConfig(smoothing=smoothing, scale="std_floor", std_floor=0.1)
    torch.testing.assert_close(group_advantages(f64(1.0, 1.02), config), f64(-0.1, 0.1))
    torch.testing.assert_close(group_advantages(f64(1.0, 3.0), config), f64(-1.0, 1.0))


def test_noise_floor_is_the_noise_of_the_groups_own_timings() -> None:
    """Rewards 1.00, 1.02 with a timing noise of 0.1: +-0.01 / 0.1; with less noise than spread: the plain deviation."""
    config = GrpoConfig(smoothing="none", scale="noise_floor", std_floor=99.0)
    torch.testing.assert_close(group_advantages(f64(1.0, 1.02), config, noise=0.1), f64(-0.1, 0.1))
    torch.testing.assert_close(group_advantages(f64(1.0, 3.0), config, noise=0.1), f64(-1.0, 1.0))
    torch.testing.assert_close(group_advantages(f64(1.0, 1.02), config), f64(-1.0, 1.0))


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    """Rewards 0, 3, 6: the others' means are 4.5, 3, 1.5: advantages -4.5, 0, 4.5."""
    config = GrpoConfig(smoothing="none", scale="none", baseline="leave_one_out")
    torch.testing.assert_close(group_advantages(f64(0, 3, 6), config), f64(-4.5, 0, 4.5))


def test_no_variance_or_one_sample_gives_no_advantage() -> None:
    assert group_advantages(f64(2, 2, 2), GrpoConfig()).tolist() == [0, 0, 0]
    assert group_advantages(f64(2), GrpoConfig()).tolist() == [0]


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 20), min_size=2, max_size=12), st.randoms(use_true_random=False),
    st.sampled_from(["group", "none"]), st.sampled_from(["mean", "leave_one_out"]),
    st.sampled_from(["std", "std_floor"]),
)  # fmt: skip
def test_advantages_follow_their_sample_through_any_permutation(
    rewards: list[float], rng: Any, smoothing: str, baseline: str, scale: str
) -> None:
    config = GrpoConfig(smoothing=smoothing, baseline=baseline, scale=scale)
    rewards = [round(reward, 6) for reward in rewards]
    order = list(range(len(rewards)))
    rng.shuffle(order)
    plain = group_advantages(f64(*rewards), config)
    shuffled = group_advantages(f64(*[rewards[i] for i in order]), config)
    torch.testing.assert_close(shuffled, plain[order], rtol=1e-6, atol=1e-6)
    assert abs(float(plain.sum())) < 1e-6


def test_moments_are_those_of_all_rewards() -> None:
    """1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, deviation sqrt(3.5)."""
    moments = RewardMoments().with_rewards([1, 2]).with_rewards([3, 6])
    assert (moments.count, moments.mean, moments.squares) == (4, 3.0, pytest.approx(14.0))
    assert moments.deviation == pytest.approx(math.sqrt(3.5))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", [1 / 8, 1 / 8, 1 / 8]),
        ("sequence", [1 / 3, 1 / 9, 1 / 12]),
        ("prompt", [1 / 8, 1 / 8, 1 / 8]),
        ("constant", [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_token_weights_by_hand(aggregation: str, expected: list[float]) -> None:
    """Lengths 1, 3 of group 0 and 4 of group 1. Tokens of the step: 8. Sequences: 3. Prompts: 4 tokens each, 2 prompts.
    Constant: 3 sequences of 10 tokens."""
    config = GrpoConfig(aggregation=aggregation, aggregation_tokens=10)
    weights = token_weights([1, 3, 4], [0, 0, 1], config)
    assert weights == pytest.approx(expected)
    total = sum(weight * length for weight, length in zip(weights, [1, 3, 4], strict=True))
    assert total == pytest.approx(8 / 30 if aggregation == "constant" else 1.0)


def test_prompts_of_different_lengths_count_alike() -> None:
    """Group 0 has 2 tokens, group 1 has 6: weights 1/4 and 1/12; by tokens each would be 1/8."""
    assert token_weights([2, 6], [0, 1], GrpoConfig(aggregation="prompt")) == pytest.approx([1 / 4, 1 / 12])


def loss_of(
    new: list[float], old: list[float], advantages: list[float], config: GrpoConfig, **others: list[float]
) -> GrpoLoss:
    """The loss of tokens with these probabilities, averaged over them; `others` are log-probabilities."""
    weights = f64(*[1.0 / len(new)] * len(new))
    extra: dict[str, Any] = {name: f64(*values) for name, values in others.items()}
    return grpo_loss(f64(*new).log(), f64(*advantages), weights, config, old_logprobs_n=f64(*old).log(), **extra)


def test_clipped_surrogate_by_hand() -> None:
    """Old probabilities 0.5; new 0.75, 0.25, 0.75, 0.25: ratios 1.5, 0.5, 1.5, 0.5; clip 0.2 low, 0.3 high.

    Advantages 1, 1, -1, -1: min(1.5, 1.3) = 1.3; min(0.5, 0.8) = 0.5; min(-1.5, -1.3) = -1.5; min(-0.5, -0.8) = -0.8.
    Sum -0.5, mean -0.125, loss 0.125. Clipped: the first above, the last below.
    """
    config = GrpoConfig(clip_low=0.2, clip_high=0.3)
    loss = loss_of([0.75, 0.25, 0.75, 0.25], [0.5] * 4, [1, 1, -1, -1], config)
    assert float(loss.loss) == pytest.approx(0.125)
    assert (loss.clipped_high, loss.clipped_low) == (1, 1)
    assert (loss.ratio_sum, loss.ratio_max) == (pytest.approx(4.0), pytest.approx(1.5))


def test_clipped_tokens_have_no_gradient() -> None:
    """In the example above the first and last token are at the clip: gradient 0; the others' is -A x ratio / 4."""
    logprobs = f64(0.75, 0.25, 0.75, 0.25).log().requires_grad_()
    loss = grpo_loss(
        logprobs, f64(1, 1, -1, -1), f64(*[0.25] * 4), GrpoConfig(clip_high=0.3), old_logprobs_n=f64(*[0.5] * 4).log()
    )
    loss.loss.backward()
    torch.testing.assert_close(logprobs.grad, f64(0.0, -0.125, 0.375, 0.0))


def test_correction_is_truncated_at_its_cap() -> None:
    """Old 0.5, sampler 0.25, 0.1, 1.0: weights 2, 5 -> 2, 0.5. Ratio and advantages 1: loss -(2 + 2 + 0.5) / 3."""
    sampler = [math.log(0.25), math.log(0.1), 0.0]
    loss = loss_of([0.5] * 3, [0.5] * 3, [1, 1, 1], GrpoConfig(), sampler_logprobs_n=sampler)
    assert float(loss.loss) == pytest.approx(-1.5)
    assert loss.correction_cut == 1
    assert loss.mismatch_sum == pytest.approx(math.log(2) + math.log(5) + math.log(0.5))
    off = loss_of([0.5] * 3, [0.5] * 3, [1, 1, 1], GrpoConfig(correction="none"), sampler_logprobs_n=sampler)
    assert float(off.loss) == pytest.approx(-1.0)


def test_kl_by_hand_and_clamped() -> None:
    """New 0.5, reference 0.25: log ratio -ln 2, k3 = 0.5 + ln 2 - 1 = 0.193147; weight 0.1, advantage 0."""
    assert float(k3(f64(math.log(0.5)), 20)) == pytest.approx(0.1931471806)
    assert float(k3(f64(1000.0), 2.0)) == pytest.approx(math.exp(2) - 3)
    loss = loss_of([0.5], [0.5], [0.0], GrpoConfig(kl_weight=0.1), reference_logprobs_n=[math.log(0.25)])
    assert float(loss.loss) == pytest.approx(0.01931471806)
    assert loss.kl_sum == pytest.approx(0.1931471806)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["trainer", "sampler", "reference"])
def test_a_broken_log_probability_stops_the_step(broken: float, where: str) -> None:
    values = {name: f64(-1.0, broken if name == where else -1.0) for name in ("trainer", "sampler", "reference")}
    with pytest.raises(NotFiniteError, match=where):
        grpo_loss(
            values["trainer"], f64(1, 1), f64(0.5, 0.5), GrpoConfig(kl_weight=0.1),
            sampler_logprobs_n=values["sampler"], reference_logprobs_n=values["reference"],
        )  # fmt: skip


@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
@pytest.mark.parametrize("correction", ["truncated", "masked", "sequence_masked", "none"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt", "constant"])
def test_gradient_equals_finite_differences(kl_weight: float, correction: str, aggregation: str) -> None:
    """Central differences in float64, step 1e-6, away from the kinks of the clip."""
    torch.manual_seed(0)
    config = GrpoConfig(
        kl_weight=kl_weight, correction=correction, aggregation=aggregation, correction_floor=0.1, correction_cap=4.0
    )
    old, sampler, reference = (-torch.rand(7, dtype=torch.float64) - 0.2 for _ in range(3))
    point = old + 0.15 * torch.randn(7, dtype=torch.float64)
    advantages = f64(1, 1, 1, -2, -2, 0.5, 0.5)
    lengths = [3, 2, 2]
    weights = f64(*token_weights(lengths, [0, 0, 1], config)).repeat_interleave(torch.tensor(lengths))

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        return grpo_loss(
            logprobs, advantages, weights, config, lengths=lengths, old_logprobs_n=old, sampler_logprobs_n=sampler,
            reference_logprobs_n=reference,
        ).loss  # fmt: skip

    at = point.clone().requires_grad_()
    value(at).backward()
    assert at.grad is not None
    assert float(at.grad.abs().min()) > 1e-6, "a token without a gradient would test nothing"
    for i in range(7):
        step = torch.zeros(7, dtype=torch.float64)
        step[i] = 1e-6
        numeric = (value(point + step) - value(point - step)) / 2e-6
        assert float(at.grad[i]) == pytest.approx(float(numeric), abs=1e-8)


def test_without_old_log_probabilities_the_gradient_is_that_of_reinforce() -> None:
    """Ratio 1: d loss / d logprob = -advantage x weight, and the loss is -sum(advantage x weight)."""
    logprobs = f64(-1, -2, -3).requires_grad_()
    loss = grpo_loss(logprobs, f64(1, -1, 2), f64(0.5, 0.25, 0.25), GrpoConfig())
    loss.loss.backward()
    assert float(loss.loss.detach()) == pytest.approx(-(0.5 - 0.25 + 0.5))
    torch.testing.assert_close(logprobs.grad, f64(-0.5, 0.25, -0.5))


@settings(deadline=None)
@given(st.permutations(range(6)), st.integers(1, 5))
def test_loss_does_not_depend_on_order_or_split(order: list[int], cut: int) -> None:
    torch.manual_seed(1)
    new, old, sampler = (-torch.rand(6, dtype=torch.float64) for _ in range(3))
    advantages, weights = torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64)

    def part(index: list[int]) -> float:
        loss = grpo_loss(
            new[index], advantages[index], weights[index], GrpoConfig(), old_logprobs_n=old[index],
            sampler_logprobs_n=sampler[index],
        )  # fmt: skip
        return float(loss.loss)

    whole = part(list(range(6)))
    assert part(order) == pytest.approx(whole)
    assert part(order[:cut]) + part(order[cut:]) == pytest.approx(whole)


def test_no_std_under_group_smoothing_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match='smoothing to "running" or "none"'):
        GrpoConfig(scale="none")
