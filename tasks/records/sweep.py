"""One candidate on one task over several shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field

from tasks.records.base import Record
from tasks.records.evaluation import Evaluation, Outcome

_FROM_BEST: tuple[Outcome, ...] = ("accepted", "unscored", "rejected")


class Sweep(Record):
    """The evaluations of all shapes; what `kontrast evaluate --shapes FILE --json` prints.

    Speedups are taken over the accepted shapes alone, so read them beside `accepted`.
    """

    outcome: Outcome
    """The worst: rejected on any shape, else unscored on any, else accepted."""
    evaluations: tuple[Evaluation, ...] = Field(min_length=1)
    """In the order of the rows."""
    accepted: int = Field(ge=0)
    """Shapes that were accepted."""
    geometric_mean: float | None = None
    """Of the speedups; None without an accepted shape."""
    worst: float | None = None
    """The lowest speedup."""
    worst_shape: dict[str, Any] = Field(default_factory=dict)
    """The shape that has it."""

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation]) -> Self:
        """The summary of one evaluation a shape, of one at least."""
        outcome = max((evaluation.outcome for evaluation in evaluations), key=_FROM_BEST.index)
        rows = [
            (evaluation.measurement.speedup, evaluation.shape)
            for evaluation in evaluations
            if evaluation.outcome == "accepted" and evaluation.measurement is not None
        ]
        if not rows:
            return cls(outcome=outcome, evaluations=tuple(evaluations), accepted=0)
        mean = math.exp(math.fsum(math.log(speedup) for speedup, _ in rows) / len(rows))
        worst, shape = min(rows, key=lambda row: row[0])
        return cls(
            outcome=outcome, evaluations=tuple(evaluations), accepted=len(rows), geometric_mean=mean, worst=worst,
            worst_shape=shape,
        )  # fmt: skip
