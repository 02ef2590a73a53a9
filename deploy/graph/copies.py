"""How far a candidate is from what its prompt showed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

from tasks.records.source import normalised_source

_TOKEN = re.compile(r"\w+|[^\w\s]|\n")


@dataclass(frozen=True)
class Nearest:
    """The shown exemplar that a candidate equals, and the relative distance to the nearest one."""

    copy_of: str = ""
    """Candidate hash of the equal exemplar; empty for new work."""
    edit_distance: float | None = None
    """0 for equal normal forms, 1 for nothing shared; None when nothing was shown."""


def edit_distance(left: str, right: str) -> float:
    """1 - 2 M / T over the tokens of both normal forms: M matched in order, T in all (difflib's ratio)."""
    first, second = (_TOKEN.findall(normalised_source(text)) for text in (left, right))
    return 1.0 - SequenceMatcher(None, first, second, autojunk=False).ratio()


def nearest(source: str, content_hash: str, shown: Mapping[str, str]) -> Nearest:
    """Compares a candidate with the shown exemplars, candidate hash -> source ("" where the source is not at hand)."""
    if content_hash in shown:
        return Nearest(content_hash, 0.0)
    distances = [edit_distance(source, other) for other in shown.values() if other]
    return Nearest("", min(distances, default=None))
