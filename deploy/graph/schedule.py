"""Which task the next group is about.

Invariants: the choice follows from the seed and from what was formed so far, so that a restarted coordinator goes on
where the last one stopped; no target that is still open is ever more than one group ahead of another.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def next_target(open_targets: Sequence[T], formed: Mapping[T, int], seed: int) -> T | None:
    """The target with the fewest groups, in an order drawn anew for each round; None when none is open."""
    if not open_targets:
        return None
    least = min(formed.get(target, 0) for target in open_targets)
    order = list(open_targets)
    random.Random(f"{seed}/{least}").shuffle(order)
    return next(target for target in order if formed.get(target, 0) == least)
