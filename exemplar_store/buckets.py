"""Performance buckets: which range a speedup falls into, and where each range begins and ends.

Bucket k of a task holds the kernels with score in [k * width, (k + 1) * width) (CUDA-L1, section 3.3: B_k holds
[s_k, s_k + delta)). The score is the speedup itself, or its natural logarithm on the `log` scale.

Invariants: `index(s) == k` exactly when `low(k) <= s < high(k)` in floating point, since the server finds a bucket's
members by those bounds; means are kept as integer sums of micro-scores, so that they neither drift nor depend on order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from exemplar_store.errors import StoreUsageError
from exemplar_store.keys import Shelf

MICRO = 1_000_000
"""Micro-scores per unit of score."""
MAX_INDEX = 2**40


@dataclass(frozen=True)
class Bucketing:
    """How speedups are divided; fixed for the life of a store."""

    scale: Literal["linear", "log"] = "linear"
    width: float = 0.1

    def score(self, speedup: float) -> float:
        """What Eq. 1 averages: the speedup, or its natural logarithm on the log scale."""
        return math.log(speedup) if self.scale == "log" else speedup

    def micro_score(self, speedup: float) -> int:
        """The score in millionths, rounded."""
        return round(self.score(speedup) * MICRO)

    def low(self, index: int) -> float:
        """Smallest speedup of the bucket; rounded on the linear scale, so that 1.2 begins bucket 12 of width 0.1."""
        if self.scale == "linear":
            return round(index * self.width, 12)
        return math.exp(index * self.width) if index * self.width < 709 else math.inf

    def high(self, index: int) -> float:
        """First speedup above the bucket."""
        return self.low(index + 1)

    def index(self, speedup: float) -> int:
        """The bucket of a speedup; raises StoreUsageError unless it is positive, finite and divisible so finely."""
        if not (speedup > 0 and math.isfinite(speedup)):
            raise StoreUsageError(f"a speedup must be a positive number, not {speedup}")
        index = math.floor(self.score(speedup) / self.width)
        if abs(index) > MAX_INDEX:
            raise StoreUsageError(f"buckets of width {self.width} are too narrow for a speedup of {speedup}")
        while speedup < self.low(index):
            index -= 1
        while speedup >= self.high(index):
            index += 1
        return index


@dataclass(frozen=True)
class Bucket:
    """One non-empty bucket as the server counts it."""

    index: int
    count: int
    mean: float
    """Mean score of its exemplars."""


def read_stats(fields: Mapping[bytes, bytes]) -> dict[Shelf, list[Bucket]]:
    """Non-empty buckets of every shelf of a task, lowest first, from the task's `stats` hash."""
    found: dict[bytes, dict[bytes, list[int]]] = {}
    for field, value in fields.items():
        head, _, kind = field.rpartition(b"|")
        shelf, _, index = head.rpartition(b"|")
        if shelf:
            found.setdefault(shelf, {}).setdefault(index, [0, 0])[kind == b"s"] = int(value)
    shelves: dict[Shelf, list[Bucket]] = {}
    for shelf in sorted(found):
        buckets = [
            Bucket(int(index), count, total / count / MICRO)
            for index, (count, total) in found[shelf].items()
            if count > 0
        ]
        if buckets:
            shelves[Shelf.parse(shelf.decode())] = sorted(buckets, key=lambda bucket: bucket.index)
    return shelves
