"""GRPO's arithmetic: group advantages (CUDA-L1, Eq. 4 and 6), clipped policy loss (Eq. 5), KL.

Pure: tensors in, dataclass out. Tokens of all sequences lie in flat arrays `[N]`, so padding does not exist here, and
normalisation is a weight per token that its caller takes over the whole optimizer step: the sum of a step's parts is
the step's loss however they are split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.config import GrpoConfig
from learner.importance import importance_weights, k3, require_finite
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
    correction_cut: float
    """Tokens whose importance weight was capped or masked."""
    mismatch_sum: float
    """Sum of log trainer minus log sampler probability."""
    mismatch_kl_sum: float
    """k3 estimate of KL(sampler || trainer)."""


def group_advantages(
    rewards_g: Tensor, config: GrpoConfig, moments: RewardMoments | None = None, *, noise: float = 0.0
) -> Tensor:
    """Advantages `[G]` of one group from its rewards `[G]`.

    Eq. 6 first: (r - mu) / sigma, clipped to +-k, with mu and sigma of the group or of the run (`moments`). Then Eq. 4
    on the smoothed rewards: minus the group's mean (or the mean of the others), over the group's deviation (population
    form). A group without variance has advantages 0. A floor of the deviation, in units of the reward, holds in both:
    `std_floor`, or `noise`, the deviation of the group's timing noise.
    """
    rewards = rewards_g.double()
    if len(rewards) < 2 or float(rewards.max() - rewards.min()) == 0.0:
        return torch.zeros_like(rewards_g)
    floor = {"std_floor": config.std_floor, "noise_floor": noise}.get(config.scale, 0.0)
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


def token_weights(lengths: Sequence[int], groups: Sequence[int], config: GrpoConfig) -> list[float]:
    """Weight of each token of each sequence in its step's loss, for all sequences of the step, with their groups.

    `token`: 1 / tokens of the step. `sequence`: 1 / (own length x sequences). `prompt`: 1 / (tokens of the own group x
    groups). `constant`: 1 / (sequences x `aggregation_tokens`). But for the last, a step's weights sum to 1.
    """
    if config.aggregation == "token":
        return [1.0 / sum(lengths)] * len(lengths)
    if config.aggregation == "sequence":
        return [1.0 / (length * len(lengths)) for length in lengths]
    if config.aggregation == "constant":
        return [1.0 / (len(lengths) * config.aggregation_tokens)] * len(lengths)
    tokens: Counter[int] = Counter()
    for length, group in zip(lengths, groups, strict=True):
        tokens[group] += length
    return [1.0 / (tokens[group] * len(tokens)) for group in groups]


def grpo_loss(
    logprobs_n: Tensor,
    advantages_n: Tensor,
    weights_n: Tensor,
    config: GrpoConfig,
    *,
    lengths: Sequence[int] | None = None,
    old_logprobs_n: Tensor | None = None,
    sampler_logprobs_n: Tensor | None = None,
    reference_logprobs_n: Tensor | None = None,
) -> GrpoLoss:
    """Sum over tokens of weight x (clipped policy loss x correction + KL).

    The ratio is policy over old policy; without `old_logprobs_n` (one update per batch) the old policy is the present
    one, so the ratio is 1 and only its gradient remains. The correction is the old policy over the sampler (see
    `importance`), which needs the sequences' `lengths` where it masks whole sequences. Raises NotFiniteError for a NaN
    or infinite log-probability.
    """
    old = logprobs_n.detach() if old_logprobs_n is None else old_logprobs_n
    require_finite(trainer=logprobs_n, sampler=sampler_logprobs_n, reference=reference_logprobs_n)
    ratio = (logprobs_n - old).exp()
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    surrogate = torch.minimum(ratio * advantages_n, clipped * advantages_n)
    correction, cut = importance_weights(old, sampler_logprobs_n, config, lengths)
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
            correction_cut=cut,
            mismatch_sum=float(mismatch.sum()),
            mismatch_kl_sum=float(k3(mismatch, config.kl_log_clamp).sum()),
        )
