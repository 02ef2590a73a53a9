"""Sampled sequences on their way into an optimizer step, for every stage that samples.

Invariants: every token's log-probability of the sampler is the sampler's own; a step's items are the same on all ranks,
and each rank computes its own share of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from learner.batch import TokenBatch, TokenSequence, pack, split_shared
from learner.errors import UntrainableSample
from tasks.errors import KontrastError

if TYPE_CHECKING:
    from torch import Tensor

    from learner.engine import PolicyTrainer, StepReport
    from tasks.records import Prompt, Sample


@dataclass(frozen=True)
class TrainItem:
    """One sample as the step needs it; plain values, so that it can travel between ranks."""

    sequence: TokenSequence
    sampler_logprobs: tuple[float, ...]
    """Empty where the sampler gave none."""
    advantage: float
    """What its log-probability is multiplied by: GRPO's advantage, REINFORCE's reward."""
    group: int = 0
    """Number of its group within the step."""


def train_item(sample: Sample, prompt: Prompt, advantage: float, group: int) -> TrainItem:
    """The item of one sample. Raises UntrainableSample without token ids, KontrastError for unequal lengths."""
    prompt_ids = sample.prompt_token_ids or prompt.token_ids
    if not sample.token_ids or not prompt_ids:
        raise UntrainableSample(
            f"sample {sample.id} has no token ids, which training needs: use the vllm or transformers engine"
        )
    if sample.logprobs and len(sample.logprobs) != len(sample.token_ids):
        raise KontrastError(f"sample {sample.id} has {len(sample.logprobs)} log-probabilities for its tokens")
    return TrainItem(TokenSequence(prompt_ids, sample.token_ids), sample.logprobs, advantage, group)


@dataclass(frozen=True)
class Row:
    """One micro-batch: its items, and the weight of each one's tokens in the step's loss."""

    items: tuple[TrainItem, ...]
    weights: tuple[float, ...]

    @property
    def lengths(self) -> list[int]:
        """Completion tokens of each item."""
        return [len(item.sequence.completion_ids) for item in self.items]

    def batch(self) -> TokenBatch:
        """The tokens, packed."""
        return pack([item.sequence for item in self.items])

    def per_token(self, values: Sequence[float], device: str) -> Tensor:
        """A value of each item, for each of its completion tokens: `[N]`."""
        import torch

        return torch.tensor(values).repeat_interleave(torch.tensor(self.lengths)).to(device)

    def sampler_logprobs(self, device: str) -> Tensor | None:
        """The sampler's log-probabilities `[N]`; None where it gave none. Raises KontrastError where only some lack."""
        import torch

        given = [torch.tensor(item.sampler_logprobs) for item in self.items if item.sampler_logprobs]
        if not given:
            return None
        if len(given) != len(self.items):
            raise KontrastError("some samples of this step have the sampler's log-probabilities and others do not")
        return torch.cat(given).to(device)


def own_rows(
    trainer: PolicyTrainer, items: Sequence[TrainItem], weights: Sequence[float], row_tokens: int
) -> list[Row]:
    """This rank's share of the items, in micro-batches of at most `row_tokens` tokens."""
    first, last = (len(items) * n // trainer.world for n in (trainer.rank, trainer.rank + 1))
    own, own_weights = items[first:last], weights[first:last]
    return [
        Row(tuple(own[i] for i in row), tuple(own_weights[i] for i in row))
        for row in split_shared([item.sequence for item in own], row_tokens)
    ]


def step_figures(report: StepReport, loss: float, tokens: float, computed: float) -> dict[str, float]:
    """What every step says of itself; sums over all ranks go in."""
    return {
        "loss": loss, "completion_tokens": tokens, "computed_tokens": computed,
        "gradient_norm": report.gradient_norm, "learning_rate": report.learning_rate, "seconds": report.seconds,
        "tokens_per_s": computed / max(report.seconds, 1e-9),
    }  # fmt: skip
