"""Walks a tensor in tiles, a chunk at a time, so that no temporary is as large as the tensor.

Invariants: every element is in exactly one tile; a tile never spans entries of the first dimension where those are
larger than a tile, so that an error in one entry is not hidden by the others; order is logical (row major), whatever
the strides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

TILE = 1024
"""Elements of a tile, at most."""
CHUNK = 1 << 18
"""Elements of a chunk on a CPU: 2 MiB as float64, so that the passes stay in cache."""
CHUNK_DEVICE = 1 << 24


@dataclass(frozen=True)
class Chunk:
    """A run of whole tiles of several tensors of one shape.

    `parts` are the tensors' values as (tiles, width), the last tile of a row padded with zeros; `counts` the elements
    of each tile without padding; `start` the flat index of the first element, `row` the elements between the starts
    of padded rows and `per_row` the tiles of one.
    """

    parts: tuple[torch.Tensor, ...]
    counts: torch.Tensor
    start: int
    row: int
    per_row: int
    whole_entries: bool
    """A row is one entry of the first dimension; otherwise a tile holds several entries."""

    def entry_rms(self, tile_rms: torch.Tensor) -> torch.Tensor:
        """For each tile the RMS of the entry that it is part of, or its own RMS, whichever is larger."""
        if not self.whole_entries or self.per_row == 1:
            return tile_rms
        squares = (tile_rms.square() * self.counts).view(-1, self.per_row).sum(dim=1) / self.row
        return torch.maximum(tile_rms, squares.sqrt().repeat_interleave(self.per_row))

    def flat_index(self, tile: int, position: int) -> int:
        """Index in the whole tensor's flat order of an element of a tile."""
        width = self.parts[0].shape[1]
        return self.start + tile // self.per_row * self.row + tile % self.per_row * width + position


def chunks(*tensors: torch.Tensor, limit: int | None = None) -> Iterator[Chunk]:
    """Chunks of tensors of one shape, in order; nothing for empty tensors."""
    first = tensors[0]
    if first.numel() == 0:
        return
    if limit is None:
        limit = CHUNK if first.device.type == "cpu" else CHUNK_DEVICE
    yield from _walk([tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors], 0, limit)


def _walk(tensors: list[torch.Tensor], start: int, limit: int) -> Iterator[Chunk]:
    entries = tensors[0].shape[0]
    size = tensors[0].numel() // entries
    if size > limit:
        for entry in range(entries):
            yield from _walk([tensor[entry] for tensor in tensors], start + entry * size, limit)
        return
    together = max(1, TILE // size)
    step = max(1, limit // (size * together)) * together
    for low in range(0, entries, step):
        parts = [tensor[low : low + step] for tensor in tensors]
        yield _tiled(parts, start + low * size, size, together)


def _tiled(parts: list[torch.Tensor], start: int, size: int, together: int) -> Chunk:
    """Tiles of consecutive entries: several entries a tile, or several tiles an entry."""
    if together > 1:
        total = parts[0].numel()
        row, rows = total, 1
        width = min(size * together, total)
        per_row = math.ceil(total / width)
    else:
        row, rows = size, parts[0].shape[0]
        per_row = math.ceil(size / TILE)
        width = math.ceil(size / per_row)
        per_row = math.ceil(size / width)
    padding = per_row * width - row
    flat = [part.reshape(rows, row) for part in parts]
    if padding:
        flat = [torch.nn.functional.pad(part, (0, padding)) for part in flat]
    counts = torch.full((per_row,), width, dtype=torch.float64, device=parts[0].device)
    counts[-1] = width - padding
    return Chunk(
        parts=tuple(part.reshape(rows * per_row, width) for part in flat),
        counts=counts.repeat(rows),
        start=start,
        row=row,
        per_row=per_row,
        whole_entries=together == 1,
    )
