"""Which task the next group is about: a fixed, seeded order that a restarted coordinator continues.

Invariants: the n-th group's task follows from the seed and n alone; every task comes once per round; a skipped task's
turn goes to the next one.
"""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Schedule(Generic[T]):
    """Rounds over the items, each round in an order of its own."""

    items: tuple[T, ...]
    seed: int = 0

    def round(self, number: int) -> list[T]:
        """The items of one round, shuffled by seed and round number."""
        order = list(self.items)
        random.Random(f"{self.seed}/{number}").shuffle(order)
        return order

    def choose(self, ordinal: int, skipped: Container[T] = ()) -> T | None:
        """The item of group number `ordinal` (from 0); None when every item is skipped."""
        if not self.items:
            return None
        number, position = divmod(ordinal, len(self.items))
        order = self.round(number)
        rotated: Sequence[T] = order[position:] + order[:position]
        return next((item for item in rotated if item not in skipped), None)
