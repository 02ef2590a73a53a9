"""Stage 3: one optimizer step of contrastive RL (GRPO) over judged groups.

Invariants: only fit groups come in; the advantages are those of whole groups, wherever their samples are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from learner.batch import TokenBatch
from learner.config import GrpoConfig
from learner.groups import JudgedGroup
from learner.grpo import GrpoLoss, group_advantages, grpo_loss, token_weights
from learner.moments import RewardMoments
from learner.sampled import Row, TrainItem, own_rows, step_figures, train_item
from tasks.errors import KontrastError

if TYPE_CHECKING:
    from torch import Tensor

    from learner.engine import PolicyTrainer, StepReport
    from learner.reference import FrozenWeights


def train_items(groups: Sequence[JudgedGroup], config: GrpoConfig, moments: RewardMoments) -> list[TrainItem]:
    """The samples of the groups with their advantages, group by group and turn by turn.

    Of several turns each has its own baseline, from the others of its turn, and earns what follows it as well.
    Completions that reached the token limit are left out of the gradient where the configuration says so; their rewards
    count in the group either way. Raises UntrainableSample.
    """
    import torch

    items = []
    for number, group in enumerate(groups):
        turns = group.by_turn(config.turn_discount)
        own = config if len(turns) == 1 else config.model_copy(update={"baseline": "leave_one_out"})
        for scored in turns:
            earned = torch.tensor([value for _, value in scored], dtype=torch.float64)
            advantages = group_advantages(earned, own, moments, noise=group.noise).tolist()
            for (sample, _), advantage in zip(scored, advantages, strict=True):
                item = train_item(sample.sample, group.group.prompt, advantage, number)
                if sample.sample.finish_reason != "length" or config.truncated_completions == "train":
                    items.append(item)
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
    weights = token_weights([len(i.sequence.completion_ids) for i in items], [i.group for i in items], config)
    rows = own_rows(trainer, items, weights, row_tokens)
    batches = [row.batch() for row in rows]
    old = trainer.logprobs(batches, temperature) if config.updates_per_batch > 1 else None
    frozen = None
    if config.kl_weight > 0 and reference is not None:
        with reference.swapped_in(trainer.policy):
            frozen = trainer.logprobs(batches, temperature)
    parts: list[GrpoLoss] = []
    entropies: list[float] = []

    def loss_of(logprobs: Tensor, entropy: Tensor, number: int) -> Tensor:
        part = _part(
            logprobs, rows[number], config, None if old is None else old[number],
            None if frozen is None else frozen[number],
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


def _part(logprobs: Tensor, row: Row, config: GrpoConfig, old: Tensor | None, frozen: Tensor | None) -> GrpoLoss:
    device = str(logprobs.device)
    return grpo_loss(
        logprobs, row.per_token([item.advantage for item in row.items], device), row.per_token(row.weights, device),
        config, lengths=row.lengths, old_logprobs_n=old, sampler_logprobs_n=row.sampler_logprobs(device),
        reference_logprobs_n=frozen,
    )  # fmt: skip


def _figures(
    trainer: PolicyTrainer, report: StepReport, parts: Sequence[GrpoLoss], entropy: float,
    batches: Sequence[TokenBatch],
) -> dict[str, float]:  # fmt: skip
    sums = trainer.total_over_ranks(
        report.loss, float(sum(p.tokens for p in parts)), sum(p.kl_sum for p in parts),
        sum(p.clipped_low for p in parts), sum(p.clipped_high for p in parts), sum(p.ratio_sum for p in parts),
        sum(p.correction_cut for p in parts), sum(p.mismatch_sum for p in parts),
        sum(p.mismatch_kl_sum for p in parts), entropy, float(sum(b.tokens for b in batches)),
    )  # fmt: skip
    loss, tokens, kl, low, high, ratio, cut, mismatch, mismatch_kl, entropy_sum, computed = sums
    per = 1.0 / max(tokens, 1.0)
    return {
        **step_figures(report, loss, tokens, computed), "kl": kl * per,
        "clipped_low_share": low * per, "clipped_high_share": high * per, "ratio_mean": ratio * per,
        "ratio_max": max((p.ratio_max for p in parts), default=0.0), "correction_cut_share": cut * per,
        "mismatch_mean": mismatch * per, "mismatch_kl": mismatch_kl * per, "entropy": entropy_sum * per,
    }  # fmt: skip
