"""Stage 2: one optimizer step of REINFORCE over judged groups: sample, evaluate, keep successes, update on them.

Invariants: speed plays no part; failures are never computed, but their tokens count in the step's average, so that the
loss is REINFORCE's estimate over all samples and not a fine-tuning on whatever succeeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from learner.config import SelfSupervisedConfig
from learner.groups import JudgedGroup
from learner.reinforce import ReinforceLoss, reinforce_loss
from learner.sampled import TrainItem, own_rows, step_figures, train_item

if TYPE_CHECKING:
    from torch import Tensor

    from learner.engine import PolicyTrainer


def reinforce_items(groups: Sequence[JudgedGroup], config: SelfSupervisedConfig) -> list[TrainItem]:
    """The samples of the groups with their rewards, failures included. Raises UntrainableSample."""
    return [
        train_item(sample.sample, group.group.prompt, reward, number)
        for number, group in enumerate(groups)
        for sample, reward in group.scored()
        if sample.sample.finish_reason != "length" or config.truncated_completions == "train"
    ]


def reinforce_step(
    trainer: PolicyTrainer,
    items: Sequence[TrainItem],
    config: SelfSupervisedConfig,
    *,
    row_tokens: int,
    temperature: float = 1.0,
) -> dict[str, float]:
    """Takes one optimizer step on the items that succeeded; every rank calls it with the same items."""
    kept = [item for item in items if item.advantage != 0.0]
    weight = 1.0 / max(1, sum(len(item.sequence.completion_ids) for item in items))
    rows = own_rows(trainer, kept, [weight] * len(kept), row_tokens)
    batches = [row.batch() for row in rows]
    parts: list[ReinforceLoss] = []
    entropies: list[float] = []

    def loss_of(logprobs: Tensor, entropy: Tensor, number: int) -> Tensor:
        row, device = rows[number], str(logprobs.device)
        part = reinforce_loss(
            logprobs, row.per_token([item.advantage for item in row.items], device), row.per_token(row.weights, device),
            config, lengths=row.lengths, sampler_logprobs_n=row.sampler_logprobs(device),
        )  # fmt: skip
        parts.append(part)
        entropies.append(float(entropy.sum()))
        return part.loss

    report = trainer.step(batches, loss_of, temperature=temperature, entropy=True)
    loss, tokens, cut, mismatch, mismatch_kl, entropy, computed = trainer.total_over_ranks(
        report.loss, float(sum(p.tokens for p in parts)), sum(p.correction_cut for p in parts),
        sum(p.mismatch_sum for p in parts), sum(p.mismatch_kl_sum for p in parts), sum(entropies),
        float(sum(batch.tokens for batch in batches)),
    )  # fmt: skip
    per = 1.0 / max(tokens, 1.0)
    return {
        **step_figures(report, loss, tokens, computed), "kept_share": len(kept) / max(1, len(items)),
        "correction_cut_share": cut * per, "mismatch_mean": mismatch * per, "mismatch_kl": mismatch_kl * per,
        "entropy": entropy * per,
    }  # fmt: skip
