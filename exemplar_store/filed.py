"""Records as the store files them, beside the exemplar: evaluations with provenance, claims, and the cache's key."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from exemplar_store.keys import Shelf, exemplar_id
from tasks.records import Evaluation
from tasks.records.base import Record
from tasks.records.task import Precision

CLAIMED = "claimed"
"""The protocol part of the shelf on which claims stand: nobody here measured them."""


class CacheKey(NamedTuple):
    """What decides a measurement, beside the evaluator's version."""

    candidate_hash: str
    task_hash: str
    device_type: str
    precision: str = "fp32"
    protocol: str = "sequential"
    rules: str = "strict"

    @classmethod
    def of(cls, evaluation: Evaluation) -> CacheKey:
        """The key under which an evaluation is found again."""
        return cls(
            evaluation.candidate_hash, evaluation.task_hash, evaluation.device_type, evaluation.precision,
            evaluation.protocol, evaluation.rules,
        )  # fmt: skip

    @property
    def shelf(self) -> Shelf:
        """The shelf of the measurement."""
        return Shelf(self.device_type, self.precision, self.protocol)

    @property
    def field(self) -> str:
        """Name of the value within its shelf."""
        name = exemplar_id(self.candidate_hash)
        return name if self.rules == "strict" else f"{name}:{self.rules}"


class FiledEvaluation(Record):
    """An evaluation as it is kept, with its provenance. `source` is empty where an exemplar on the shelf holds it."""

    evaluation: Evaluation
    source: str = ""
    origin: str = ""
    """Sample id, seed name or file that the candidate came from."""


class Claim(Record):
    """A kernel from elsewhere with the speedup its source reports; never drawn and never a best: evaluate it first."""

    task_id: str
    task_hash: str
    device_type: str
    precision: Precision = "fp32"
    source: str
    candidate_hash: str
    claimed_speedup: float | None = Field(default=None, gt=0)
    """None where the source gives no number."""
    origin: str
    """Where it came from: data set, level and task."""

    @property
    def shelf(self) -> Shelf:
        """The shelf of claims of its device type."""
        return Shelf(self.device_type, self.precision, CLAIMED)
