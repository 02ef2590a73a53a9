"""REINFORCE with reward 1 or 0 and no baseline: stage 2's arithmetic (CUDA-L1, section 2.2).

Pure. Failures have reward 0, so they give no gradient and need no forward pass; their tokens count in the weights that
the caller gives, so the loss is the estimate over all samples: -(1 / tokens) sum of reward x log-probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.config import SelfSupervisedConfig
from learner.importance import importance_weights, k3, require_finite

MISMATCH_CLAMP = 20.0
"""Bound of the log-ratio inside the mismatch's estimate."""


@dataclass(frozen=True)
class ReinforceLoss:
    """A part of a step's loss. `loss` carries the gradient; the rest is detached: sums over this part's `tokens`."""

    loss: Tensor
    tokens: int
    correction_cut: float
    mismatch_sum: float
    mismatch_kl_sum: float


def reinforce_loss(
    logprobs_n: Tensor,
    rewards_n: Tensor,
    weights_n: Tensor,
    config: SelfSupervisedConfig,
    *,
    lengths: Sequence[int] | None = None,
    sampler_logprobs_n: Tensor | None = None,
) -> ReinforceLoss:
    """Sum over tokens of -weight x reward x importance x log-probability.

    Its gradient is REINFORCE's, corrected by the trainer's over the sampler's probability (see `importance`). Raises
    NotFiniteError for a NaN or infinite log-probability.
    """
    require_finite(trainer=logprobs_n, sampler=sampler_logprobs_n)
    importance, cut = importance_weights(logprobs_n, sampler_logprobs_n, config, lengths)
    loss = -(weights_n * rewards_n * importance * logprobs_n).sum()
    with torch.no_grad():
        sampler = logprobs_n if sampler_logprobs_n is None else sampler_logprobs_n
        mismatch = logprobs_n - sampler
        return ReinforceLoss(
            loss=loss, tokens=len(logprobs_n), correction_cut=cut, mismatch_sum=float(mismatch.sum()),
            mismatch_kl_sum=float(k3(mismatch, MISMATCH_CLAMP).sum()),
        )  # fmt: skip
