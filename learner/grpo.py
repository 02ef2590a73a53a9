"""GRPO's arithmetic: group advantages (CUDA-L1, Eq. 4 and 6), clipped policy loss (Eq. 5), KL, sampler correction.

Pure: tensors in, dataclass out. Tokens of all sequences lie in flat arrays `[N]`, so padding does not exist here, and
normalisation is a weight per token that its caller takes over the whole optimizer step: the sum of a step's parts is
the step's loss however they are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.config import GrpoConfig
from learner.errors import NotFiniteError
from learner.moments import RewardMoments
from tasks.errors import KontrastError


@dataclass(frozen=True)
class GrpoLoss:
    """A part of a step's loss, and what it says about the policy.

    `loss` carries the gradient and is this part's share of the whole step. The rest is detached: sums over this part's
    `tokens`, to be divided by the step's tokens, except `ratio_max`.
    """

    loss: Tensor
    tokens: int
    kl_sum: float
    clipped_low: float
    clipped_high: float
    ratio_sum: float
    ratio_max: float
    correction_capped: float
    mismatch_sum: float
    """Sum of log trainer minus log sampler probability."""
    mismatch_kl_sum: float
    """k3 estimate of KL(sampler || trainer)."""


def group_advantages(rewards_g: Tensor, config: GrpoConfig, moments: RewardMoments | None = None) -> Tensor:
    """Advantages `[G]` of one group from its rewards `[G]`.

    Eq. 6 first: (r - mu) / sigma, clipped to +-k, with mu and sigma of the group or of the run (`moments`). Then Eq. 4
    on the smoothed rewards: minus the group's mean (or the mean of the others), over the group's deviation (population
    form). A group without variance has advantages 0. A `std_floor`, given in units of the reward, holds in both.
    """
    rewards = rewards_g.double()
    if len(rewards) < 2 or float(rewards.max() - rewards.min()) == 0.0:
        return torch.zeros_like(rewards_g)
    floor = config.std_floor if config.scale == "std_floor" else 0.0
    if config.smoothing != "none":
        if config.smoothing == "running" and moments is not None and moments.deviation > 0:
            mean, sigma = moments.mean, moments.deviation
        else:
            mean, sigma = float(rewards.mean()), float(rewards.std(correction=0))
        sigma = max(sigma, floor)
        floor = floor / sigma
        rewards = ((rewards - mean) / sigma).clamp(-config.smoothing_clip, config.smoothing_clip)
    centred = rewards - rewards.mean()
    if config.baseline == "leave_one_out":
        centred = centred * (len(rewards) / (len(rewards) - 1))
    if config.scale != "none":
        deviation = max(float(rewards.std(correction=0)), floor)
        centred = centred / deviation if deviation > 0 else torch.zeros_like(centred)
    return centred.to(rewards_g.dtype)


def token_weights(lengths: Sequence[int], aggregation: str, *, step_tokens: float, step_sequences: float) -> Tensor:
    """Weight of each token `[N]` in the step's loss, for sequences of these lengths; a step's weights sum to 1.

    `token`: 1 / tokens of the step. `sequence`: 1 / (own length x sequences of the step).
    """
    if aggregation == "token":
        return torch.full((sum(lengths),), 1.0 / step_tokens)
    parts = [torch.full((length,), 1.0 / (length * step_sequences)) for length in lengths]
    return torch.cat(parts) if parts else torch.zeros(0)


def grpo_loss(
    logprobs_n: Tensor,
    advantages_n: Tensor,
    weights_n: Tensor,
    config: GrpoConfig,
    *,
    old_logprobs_n: Tensor | None = None,
    sampler_logprobs_n: Tensor | None = None,
    reference_logprobs_n: Tensor | None = None,
) -> GrpoLoss:
    """Sum over tokens of weight x (clipped policy loss x correction + KL).

    The ratio is policy over old policy; without `old_logprobs_n` (one update per batch) the old policy is the present
    one, so the ratio is 1 and only its gradient remains. The correction is the old policy over the sampler, capped.
    Raises NotFiniteError for a NaN or infinite log-probability.
    """
    old = logprobs_n.detach() if old_logprobs_n is None else old_logprobs_n
    for name, values in (("trainer", logprobs_n), ("sampler", sampler_logprobs_n), ("reference", reference_logprobs_n)):
        if values is not None and not bool(torch.isfinite(values).all()):
            raise NotFiniteError(f"a log-probability of the {name} is not finite: nothing was trained on this step")
    ratio = (logprobs_n - old).exp()
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    surrogate = torch.minimum(ratio * advantages_n, clipped * advantages_n)
    correction, capped = _correction(old, sampler_logprobs_n, config)
    token_loss = -surrogate * correction
    kl = torch.zeros_like(logprobs_n)
    if config.kl_weight > 0:
        if reference_logprobs_n is None:
            raise KontrastError(
                "kl_weight is above 0 but there is no reference model: set it to 0, or keep a reference"
            )
        kl = k3(reference_logprobs_n - logprobs_n, config.kl_log_clamp)
        token_loss = token_loss + config.kl_weight * kl
    loss = (token_loss * weights_n).sum()
    mismatch = torch.zeros_like(old) if sampler_logprobs_n is None else logprobs_n.detach() - sampler_logprobs_n
    with torch.no_grad():
        return GrpoLoss(
            loss=loss,
            tokens=len(logprobs_n),
            kl_sum=float(kl.sum()),
            clipped_low=float(((ratio < 1.0 - config.clip_low) & (advantages_n < 0)).sum()),
            clipped_high=float(((ratio > 1.0 + config.clip_high) & (advantages_n > 0)).sum()),
            ratio_sum=float(ratio.sum()),
            ratio_max=float(ratio.max()) if len(ratio) else 0.0,
            correction_capped=capped,
            mismatch_sum=float(mismatch.sum()),
            mismatch_kl_sum=float(k3(mismatch, config.kl_log_clamp).sum()),
        )


def k3(log_ratio_n: Tensor, clamp: float) -> Tensor:
    """The k3 estimate of KL(p || q) per token of p, from log q - log p clamped to +-`clamp`; never negative."""
    bounded = log_ratio_n.clamp(-clamp, clamp)
    return bounded.exp() - bounded - 1.0


def _correction(old_n: Tensor, sampler_n: Tensor | None, config: GrpoConfig) -> tuple[Tensor, float]:
    """Truncated importance weights of the old policy against the sampler, and how many were cut."""
    if sampler_n is None or config.correction == "none":
        return torch.ones_like(old_n), 0.0
    weights = (old_n.detach() - sampler_n).exp()
    return weights.clamp(max=config.correction_cap), float((weights > config.correction_cap).sum())
