"""Which tasks may be trained on: decided by family, composition and content, never by id or position.

Invariants: a training task contains no held-out pair of sub-skills; a held-out composition contains at least one pair
that no training task contains; equal content is always in the same split, whatever it is called or where it is found.
"""

from __future__ import annotations

import hashlib
from itertools import combinations
from typing import Literal

from tasks.procedural import HELD_OUT_FAMILIES
from tasks.records import Task

Split = Literal["train", "held_out_composition", "held_out_family", "held_out_instance"]

PAIRS_HELD_OUT = 12
"""One pair of sub-skills in so many is never trained together."""
INSTANCES_HELD_OUT = 10
"""One task in so many, of those whose composition may be trained on, is kept for testing."""

_SALT = "kontrast split 1"


def split_of(task: Task) -> Split:
    """The split of one task. The first that applies of: family, composition, instance."""
    if task.family in HELD_OUT_FAMILIES:
        return "held_out_family"
    if any(is_held_out_pair(a, b) for a, b in pairs_of(task.composition)):
        return "held_out_composition"
    return "held_out_instance" if _one_in(INSTANCES_HELD_OUT, "instance", task.content_hash) else "train"


def pairs_of(composition: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """All pairs of different sub-skills, each in alphabetical order."""
    return tuple(combinations(sorted(set(composition)), 2))


def is_held_out_pair(first: str, second: str) -> bool:
    """Whether two sub-skills are never trained together; the same for both orders and in every family."""
    return _one_in(PAIRS_HELD_OUT, "pair", *sorted((first, second)))


def _one_in(count: int, *key: str) -> bool:
    digest = hashlib.sha256("/".join((_SALT, *key)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % count == 0
