"""The candidate: source text with `ModelNew`, and where it came from."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from tasks.records.base import Record, digest
from tasks.records.source import normalised_source

Origin = Literal["file", "text", "sample", "seed", "import", "reference"]


class Candidate(Record):
    """A proposed replacement of a task's reference.

    The content hash covers the normalised source only: two samples may hold the same candidate.
    """

    source: str
    origin: Origin = "text"
    detail: str = ""
    """Path, sample id or seed name that the source came from; never part of the hash."""

    @cached_property
    def content_hash(self) -> str:
        """64 hex digits over the normalised source."""
        return digest("candidate", normalised_source(self.source))
