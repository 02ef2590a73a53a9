"""What a timing protocol asks for next, and what it says at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evaluator.timing.statistics import Order
from tasks.records.evaluation import Measurement

StopReason = Literal["half_width", "futility", "time_cap", "pairs", "window"]


@dataclass(frozen=True)
class Plan:
    """One pair of turns to run: which arm begins, how many calls each turn has, on which placement.

    `calls` counts the first call, which is dropped from the estimate. Both arms get the same number, drawn anew for
    each pair and not told to the worker. `placement` grows by one where fresh allocations are due. With `reload` the
    parameters of both arms are changed before the pair, and one untimed call of each follows.
    """

    pair: int
    placement: int
    order: Order
    calls: int
    reload: bool = False


@dataclass(frozen=True)
class Stop:
    """Timing is over, and why."""

    why: StopReason


@dataclass(frozen=True)
class TimingResult:
    """What a protocol concludes: the measurement, the labels it earns, and why it is unusable, if it is."""

    measurement: Measurement
    span_limited: bool = False
    audit_agrees: bool = True
    unstable: str = ""
    order_effect_log: float = 0.0
    placement_sd_log: float = 0.0
    spoiled_pairs: int = 0
