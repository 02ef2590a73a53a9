"""What A/A controls say about an evaluator: whether its intervals cover 1, its bias, and what placements add.

A control is the evaluation of a reference against itself. Invariant: pure; a control without a measurement counts as
failed and for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evaluator.timing.statistics import PlacementHistory, placement_history
from tasks.records import Evaluation

WINDOW = 200
"""Controls that are looked at, the newest."""
ENOUGH = 50
"""Measured controls before an alarm."""
TAIL = 0.001
"""Chance with which intervals of the nominal coverage give an alarm."""


@dataclass(frozen=True)
class Health:
    """The figures of some controls on one device type under one protocol."""

    measured: int = 0
    failed: int = 0
    """Controls that were not accepted: the judge refused a reference, or something of ours failed."""
    coverage: float = 1.0
    """Share of the intervals that hold 1."""
    bias_log: float = 0.0
    """Mean log speedup: 0 is right."""
    half_width_log: float = 0.0
    """Mean half-width of the intervals, in log units."""
    alarm: str = ""
    """What is wrong, in one sentence; empty while nothing is."""


def health(controls: Sequence[Evaluation], *, max_bias: float = 0.01) -> Health:
    """The figures of the controls.

    The alarm needs 50 of them. It is raised when so few intervals cover 1 as their nominal coverage gives once in a
    thousand (binomial tail), or when the bias is more than `max_bias` (relative).
    """
    found = [control.measurement for control in controls if control.measurement is not None]
    failed = sum(control.outcome != "accepted" for control in controls)
    if not found:
        return Health(failed=failed)
    count = len(found)
    covered = sum(m.ci_low <= 1.0 <= m.ci_high for m in found)
    bias = math.fsum(math.log(m.speedup) for m in found) / count
    nominal = math.fsum(m.confidence for m in found) / count
    problems = []
    if count >= ENOUGH and binomial_tail(covered, count, nominal) < TAIL:
        problems.append(
            f"only {covered} of {count} intervals of the reference against itself cover 1, which is nominal for "
            f"{nominal:.0%} of them"
        )
    if count >= ENOUGH and abs(math.expm1(bias)) > max_bias:
        problems.append(f"the reference reads {math.exp(bias):.3f}x against itself in the mean of {count} controls")
    return Health(
        measured=count,
        failed=failed,
        coverage=covered / count,
        bias_log=bias,
        half_width_log=math.fsum(math.log(m.ci_high / m.ci_low) for m in found) / (2 * count),
        alarm="; ".join(problems),
    )


def binomial_tail(successes: int, trials: int, probability: float) -> float:
    """The chance of at most so many successes."""
    return math.fsum(
        math.comb(trials, k) * probability**k * (1 - probability) ** (trials - k) for k in range(successes + 1)
    )


def history_of(controls: Iterable[Evaluation]) -> PlacementHistory | None:
    """The placement variance that the accepted controls of a device type show together; None without any."""
    return placement_history(
        (float(control.facts.get("placement_sd_log", 0.0)), control.measurement.placements)
        for control in controls
        if control.outcome == "accepted" and control.measurement is not None
    )
