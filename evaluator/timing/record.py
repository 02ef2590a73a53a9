"""The turns as they were measured, for whoever wants to do the arithmetic again.

One row a pair, kept by columns: `step` (`time` or `confirm`), `placement`, `order`, `calls` (counted ones, of each
arm); for either arm `*_ns` (native timer, first call left out), `*_burst_ns` (with it) and `*_span_ns` (the judge's
clock); `lead_ns` (what a call was left for its launch, by a device's clock); `spoiled` (why the pair does not count,
empty for one that does); and what the device showed beside the pair: `sm_mhz`, `memory_mhz`, `power_w`,
`temperature_c`, `reasons` (NVML's bit mask of clock event reasons). A time that is no number is null.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from evaluator.timing.hygiene import Reading
from evaluator.timing.statistics import Pair
from tasks.records.evaluation import Step

ROWS_KEPT = 20_000
"""Later pairs are counted in the measurement and not kept here: half an hour of the `paper` protocol has more."""
_READINGS = ("sm_mhz", "memory_mhz", "power_w", "temperature_c", "reasons")


class TurnRecord:
    """The columns of one evaluation."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}

    def add(self, step: Step, pair: Pair, reading: Reading) -> None:
        """One more row; columns that a device does not offer stay away."""
        if len(self.columns.get("step", ())) >= ROWS_KEPT:
            return
        row: dict[str, Any] = {"step": step}
        row |= {field.name: _plain(getattr(pair, field.name)) for field in fields(pair)}
        row |= {name: reading[name] for name in _READINGS if name in reading}
        rows = len(self.columns.get("step", ()))
        for name in {**self.columns, **row}:
            column = self.columns.setdefault(name, [None] * rows)
            column.append(row.get(name))


def _plain(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return round(value) if math.isfinite(value) else None
