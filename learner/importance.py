"""Sampler against trainer: importance weights, their masks, and the KL estimate of the mismatch.

Pure; tokens of all sequences lie in flat arrays `[N]`. Invariant: weights carry no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.config import GroupsConfig
from learner.errors import NotFiniteError
from tasks.errors import KontrastError


def importance_weights(
    old_n: Tensor, sampler_n: Tensor | None, config: GroupsConfig, lengths: Sequence[int] | None = None
) -> tuple[Tensor, float]:
    """Weight of each token, from log-probabilities of the old policy and of the sampler, and how many were cut.

    `truncated`: min(ratio, cap) (TIS). `masked`: the ratio where it lies in [floor, cap], else 0 (IcePop).
    `sequence_masked`: the truncated ratio, 0 throughout a sequence whose geometric mean ratio lies outside
    [floor, cap]; it needs the sequences' `lengths`. Without the sampler's log-probabilities all weights are 1.
    """
    if sampler_n is None or config.correction == "none":
        return torch.ones_like(old_n), 0.0
    log_ratio = old_n.detach() - sampler_n
    ratio = log_ratio.exp()
    if config.correction == "truncated":
        return ratio.clamp(max=config.correction_cap), float((ratio > config.correction_cap).sum())
    if config.correction == "masked":
        kept = (ratio >= config.correction_floor) & (ratio <= config.correction_cap)
        return torch.where(kept, ratio, torch.zeros_like(ratio)), float((~kept).sum())
    if lengths is None:
        raise KontrastError('correction = "sequence_masked" needs the lengths of the sequences')
    means = torch.stack([part.mean() for part in log_ratio.split(list(lengths))]).exp()
    passes = (means >= config.correction_floor) & (means <= config.correction_cap)
    kept = passes.repeat_interleave(torch.tensor(lengths, device=old_n.device))
    weights = ratio.clamp(max=config.correction_cap)
    return weights * kept, float((~kept | (ratio > config.correction_cap)).sum())


def k3(log_ratio_n: Tensor, clamp: float) -> Tensor:
    """The k3 estimate of KL(p || q) per token of p, from log q - log p clamped to +-`clamp`; never negative."""
    bounded = log_ratio_n.clamp(-clamp, clamp)
    return bounded.exp() - bounded - 1.0


def require_finite(**logprobs_n: Tensor | None) -> None:
    """Raises NotFiniteError that names whose log-probability is NaN or infinite."""
    for name, values in logprobs_n.items():
        if values is not None and not bool(torch.isfinite(values).all()):
            raise NotFiniteError(f"a log-probability of the {name} is not finite: nothing was trained on this step")
