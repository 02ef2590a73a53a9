"""Token batches: how prompts and completions are laid out for the policy.

Two layouts: `pad` puts one sequence in each row (causal attention, padding on the right), `pack` puts all in one row
without padding, sequences of one prompt behind one shared copy of it. In both, only completion tokens have targets,
and targets come in the order of the sequences. Pure but for torch tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from learner.attention import Segment

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and the completion to be scored; neither is empty."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class TokenBatch:
    """What one forward pass reads. N = completion tokens of all sequences.

    `source_n` are flat indices into `input_ids_bt`: the place whose output predicts `target_n`.
    `sequence_n` is the index of the sequence that each target belongs to.
    """

    input_ids_bt: Tensor
    position_ids_bt: Tensor
    source_n: Tensor
    target_n: Tensor
    sequence_n: Tensor
    segments: tuple[Segment, ...] | None = None

    def to(self, device: str) -> TokenBatch:
        """The batch with its tensors on `device`."""
        return replace(
            self,
            input_ids_bt=self.input_ids_bt.to(device), position_ids_bt=self.position_ids_bt.to(device),
            source_n=self.source_n.to(device), target_n=self.target_n.to(device),
            sequence_n=self.sequence_n.to(device),
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Tokens computed, padding included."""
        return self.input_ids_bt.numel()


def pad(sequences: Sequence[TokenSequence], pad_id: int = 0, multiple: int = 8) -> TokenBatch:
    """One sequence a row; row length is the longest one, rounded up to `multiple`.

    The last token of a completion is a target only, so rows hold one token less than their sequence.
    """
    import torch

    longest = max(len(s) for s in sequences) - 1
    width = -(-longest // multiple) * multiple
    rows: list[tuple[int, ...]] = []
    source: list[int] = []
    target: list[int] = []
    index: list[int] = []
    for row, sequence in enumerate(sequences):
        ids = (sequence.prompt_ids + sequence.completion_ids)[:-1]
        rows.append(ids + (pad_id,) * (width - len(ids)))
        first = row * width + len(sequence.prompt_ids) - 1
        source.extend(range(first, first + len(sequence.completion_ids)))
        target.extend(sequence.completion_ids)
        index.extend([row] * len(sequence.completion_ids))
    positions = torch.arange(width).expand(len(rows), width)
    return TokenBatch(torch.tensor(rows), positions, torch.tensor(source), torch.tensor(target), torch.tensor(index))


def pack(sequences: Sequence[TokenSequence]) -> TokenBatch:
    """All sequences in one row; neighbours with equal prompts share one copy of it."""
    import torch

    ids: list[int] = []
    positions: list[int] = []
    source: list[int] = []
    target: list[int] = []
    index: list[int] = []
    segments: list[Segment] = []
    prompt: tuple[int, ...] | None = None
    prefix_start = prefix_stop = 0
    for number, sequence in enumerate(sequences):
        if sequence.prompt_ids != prompt:
            prompt = sequence.prompt_ids
            prefix_start, prefix_stop = len(ids), len(ids) + len(prompt)
            segments.append(Segment(prefix_start, prefix_stop))
            ids.extend(prompt)
            positions.extend(range(len(prompt)))
        start, own = len(ids), sequence.completion_ids[:-1]
        source.append(prefix_stop - 1)
        source.extend(range(start, start + len(own)))
        target.extend(sequence.completion_ids)
        index.extend([number] * len(sequence.completion_ids))
        if own:
            segments.append(Segment(start, start + len(own), prefix_start, prefix_stop))
            ids.extend(own)
            positions.extend(range(len(prompt), len(prompt) + len(own)))
    return TokenBatch(
        torch.tensor([ids]), torch.tensor([positions]), torch.tensor(source), torch.tensor(target),
        torch.tensor(index), tuple(segments),
    )  # fmt: skip


def split_shared(sequences: Sequence[TokenSequence], row_tokens: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch, at most `row_tokens` tokens each when packed.

    Sequences of one prompt stay together as far as they fit; a single one that does not fit gets a row of its own.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, sequence in enumerate(sequences):
        by_prompt.setdefault(sequence.prompt_ids, []).append(number)
    rows: list[list[int]] = []
    used = row_tokens
    for prompt, numbers in by_prompt.items():
        lengths = [len(sequences[number].completion_ids) - 1 for number in numbers]
        whole = len(prompt) + sum(lengths)
        # A row is left early rather than a prompt computed twice.
        fresh = used + whole > row_tokens >= whole
        for at, (number, own) in enumerate(zip(numbers, lengths, strict=True)):
            need = own + (len(prompt) if at == 0 else 0)
            if (fresh and at == 0) or used + need > row_tokens:
                rows.append([])
                used, need = 0, own + len(prompt)
            rows[-1].append(number)
            used += need
    return rows


def split_padded(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Indices of each padded micro-batch, longest sequences first, at most `row_tokens` tokens with padding."""
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    rows: list[list[int]] = []
    width = 0
    for number in order:
        if not rows or (len(rows[-1]) + 1) * width > row_tokens:
            rows.append([])
            width = lengths[number]
        rows[-1].append(number)
    return rows
