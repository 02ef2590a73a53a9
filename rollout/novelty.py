"""How far a candidate is from the exemplars that its prompt showed.

A candidate whose normalised source equals a shown exemplar is a copy and earns nothing; the edit distance tells how
close the others come.
"""

from __future__ import annotations

from collections.abc import Iterable

from rapidfuzz.distance import Levenshtein

from tasks.records.candidate import Candidate
from tasks.records.source import normalised_source

MAX_COMPARED_CHARS = 20_000
"""Only this much of each normalised source is compared: the distance takes quadratic time."""


def copy_of(source: str, shown_hashes: Iterable[str]) -> str:
    """Candidate hash of the shown exemplar that the source equals after normalisation; empty for new work."""
    own = Candidate(source=source).content_hash
    return own if own in set(shown_hashes) else ""


def nearest_distance(source: str, shown_sources: Iterable[str]) -> float | None:
    """Smallest relative edit distance to the shown sources: 0 is equal, 1 has nothing in common; None when none shown.

    Levenshtein distance of the normalised texts over the length of the longer one.
    """
    own = normalised_source(source)[:MAX_COMPARED_CHARS]
    distances = [
        Levenshtein.normalized_distance(own, normalised_source(shown)[:MAX_COMPARED_CHARS]) for shown in shown_sources
    ]
    return min(distances, default=None)
