"""Stage 3: one optimizer step of contrastive RL (GRPO) over judged groups.

Invariants: only fit groups come in; every token's log-probability of the sampler is the sampler's own; the advantages
are those of whole groups, wherever their samples are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from learner.batch import TokenBatch, TokenSequence, pack, split_shared
from learner.config import GrpoConfig
from learner.errors import UntrainableSample
from learner.groups import JudgedGroup
from learner.grpo import GrpoLoss, group_advantages, grpo_loss, token_weights
from learner.moments import RewardMoments
from tasks.errors import KontrastError

if TYPE_CHECKING:
    from torch import Tensor

    from learner.engine import PolicyTrainer, StepReport
    from learner.reference import FrozenWeights


@dataclass(frozen=True)
class TrainItem:
    """One sample as the step needs it; plain values, so that it can travel between ranks."""

    sequence: TokenSequence
    sampler_logprobs: tuple[float, ...]
    """Empty where the sampler gave none."""
    advantage: float


def train_items(groups: Sequence[JudgedGroup], config: GrpoConfig, moments: RewardMoments) -> list[TrainItem]:
    """The samples of the groups with their advantages, group by group.

    Completions that reached the token limit are left out of the gradient where the configuration says so; their rewards
    count in the group either way. Raises UntrainableSample.
    """
    import torch

    items = []
    for group in groups:
        scored = group.scored()
        rewards = torch.tensor([reward for _, reward in scored], dtype=torch.float64)
        prompt_ids = group.group.prompt.token_ids
        for (sample, _), advantage in zip(scored, group_advantages(rewards, config, moments).tolist(), strict=True):
            drawn = sample.sample
            if not drawn.token_ids or not prompt_ids:
                raise UntrainableSample(
                    f"sample {drawn.id} has no token ids, which training needs: use the vllm or transformers engine"
                )
            if drawn.logprobs and len(drawn.logprobs) != len(drawn.token_ids):
                raise KontrastError(f"sample {drawn.id} has {len(drawn.logprobs)} log-probabilities for its tokens")
            if drawn.finish_reason == "length" and config.truncated_completions == "mask":
                continue
            items.append(TrainItem(TokenSequence(prompt_ids, drawn.token_ids), drawn.logprobs, advantage))
    return items


def grpo_step(
    trainer: PolicyTrainer,
    items: Sequence[TrainItem],
    config: GrpoConfig,
    *,
    row_tokens: int,
    temperature: float = 1.0,
    reference: FrozenWeights | None = None,
) -> dict[str, float]:
    """Takes `updates_per_batch` optimizer steps on the items; returns the last one's figures.

    Every rank calls it with the same items and computes its own share of them.
    """
    own = items[len(items) * trainer.rank // trainer.world : len(items) * (trainer.rank + 1) // trainer.world]
    rows = [[own[i] for i in row] for row in split_shared([item.sequence for item in own], row_tokens)]
    batches = [pack([item.sequence for item in row]) for row in rows]
    old = trainer.logprobs(batches, temperature) if config.updates_per_batch > 1 else None
    frozen = None
    if config.kl_weight > 0 and reference is not None:
        with reference.swapped_in(trainer.policy):
            frozen = trainer.logprobs(batches, temperature)
    tokens = float(sum(len(item.sequence.completion_ids) for item in items))
    parts: list[GrpoLoss] = []
    entropies: list[float] = []

    def loss_of(logprobs: Tensor, entropy: Tensor, number: int) -> Tensor:
        part = _part(
            logprobs, rows[number], config, tokens, float(len(items)),
            None if old is None else old[number], None if frozen is None else frozen[number],
        )  # fmt: skip
        parts.append(part)
        entropies.append(float(entropy.sum()))
        return part.loss

    report = None
    for _ in range(config.updates_per_batch):
        parts.clear()
        entropies.clear()
        report = trainer.step(batches, loss_of, temperature=temperature, entropy=True)
    if report is None:
        raise KontrastError("updates_per_batch must be at least 1")
    return _figures(trainer, report, parts, sum(entropies), batches)


def _part(
    logprobs: Tensor, row: Sequence[TrainItem], config: GrpoConfig, step_tokens: float, step_sequences: float,
    old: Tensor | None, frozen: Tensor | None,
) -> GrpoLoss:  # fmt: skip
    import torch

    lengths = [len(item.sequence.completion_ids) for item in row]
    device = logprobs.device
    weights = token_weights(lengths, config.aggregation, step_tokens=step_tokens, step_sequences=step_sequences)
    advantages = torch.tensor([i.advantage for i in row]).repeat_interleave(torch.tensor(lengths))
    sampler = None
    if any(item.sampler_logprobs for item in row):
        given = [torch.tensor(item.sampler_logprobs) for item in row if item.sampler_logprobs]
        if len(given) != len(row):
            raise KontrastError("some samples of this step have the sampler's log-probabilities and others do not")
        sampler = torch.cat(given).to(device)
    return grpo_loss(
        logprobs, advantages.to(device), weights.to(device), config,
        old_logprobs_n=old, sampler_logprobs_n=sampler, reference_logprobs_n=frozen,
    )  # fmt: skip


def _figures(
    trainer: PolicyTrainer, report: StepReport, parts: Sequence[GrpoLoss], entropy: float,
    batches: Sequence[TokenBatch],
) -> dict[str, float]:  # fmt: skip
    sums = trainer.total_over_ranks(
        report.loss, float(sum(p.tokens for p in parts)), sum(p.kl_sum for p in parts),
        sum(p.clipped_low for p in parts), sum(p.clipped_high for p in parts), sum(p.ratio_sum for p in parts),
        sum(p.correction_capped for p in parts), sum(p.mismatch_sum for p in parts),
        sum(p.mismatch_kl_sum for p in parts), entropy, float(sum(b.tokens for b in batches)),
    )  # fmt: skip
    loss, tokens, kl, low, high, ratio, capped, mismatch, mismatch_kl, entropy_sum, computed = sums
    per = 1.0 / max(tokens, 1.0)
    return {
        "loss": loss, "completion_tokens": tokens, "computed_tokens": computed, "kl": kl * per,
        "clipped_low_share": low * per, "clipped_high_share": high * per, "ratio_mean": ratio * per,
        "ratio_max": max((p.ratio_max for p in parts), default=0.0), "correction_capped_share": capped * per,
        "mismatch_mean": mismatch * per, "mismatch_kl": mismatch_kl * per, "entropy": entropy_sum * per,
        "gradient_norm": report.gradient_norm,
        "learning_rate": report.learning_rate, "seconds": report.seconds,
        "tokens_per_s": computed / max(report.seconds, 1e-9),
    }  # fmt: skip
