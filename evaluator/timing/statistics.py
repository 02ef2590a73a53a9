"""From paired turns to a speedup with an interval.

Invariants: everything is in natural logs of t_reference / t_candidate until the end, so that a ratio and its inverse
are treated alike; a pair is used or discarded as a whole; the interval's nominal coverage holds for looks that grow
by half (anchors: 10 % trimmed mean, winsorised standard error, t quantile; simulated in the tests).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from evaluator.judgement.defences.timer_disagreement import UNRESOLVED_LOG
from evaluator.judgement.facts import TimerFacts
from evaluator.timing.quantiles import t_quantile

TRIM = 0.10
"""Share of pairs trimmed at either end."""
MIN_PLACEMENTS = 5
"""Placements that an interval needs when it estimates their variance itself."""
MIN_PLACEMENTS_WITH_HISTORY = 3
ASSUMED_PLACEMENT_SD_LOG = 0.02
"""Placement effect assumed while there are fewer than three placements and no history to see it in."""
MIN_HISTORY_DEGREES = 10
"""Degrees of freedom from which the pooled variance of earlier A/A runs is used."""

OVERHEAD_TRIM = 0.20
"""Share trimmed from overheads at either end: on a busy machine a turn waits for a processor now and then."""
SYSTEMATIC_NS = 50_000.0
"""What the overheads of two processes may differ by without anything being wrong."""
SYSTEMATIC_SHARE = 0.03
"""The same as a share of the reference's overhead, by a device's clock: there the overhead is a wait and a delivery
for each call, which two processors run at speeds that differ by so much on a virtual machine."""
BETWEEN_PROCESSES_NS = 300.0
"""What one kernel's calls differ by from one process to another by a device's clock, at the nominal confidence: 4.5 %
of 6.5 us once in ten controls on an H200. No placement within the processes shows it."""
ORDER_PAIRS = 4
"""Pairs of either order from which the order's effect is known well enough to be taken out."""

Order = Literal["reference_first", "candidate_first"]


@dataclass(frozen=True)
class Pair:
    """One turn of each arm. Times are nanoseconds over the whole turn, per arm.

    `reference_ns` and `candidate_ns` are the native timer's totals without the first call; the `burst` totals have it.
    The `span` totals are the judge's own clock, the calibrated cost of taking the outputs away subtracted; 0 where a
    protocol does not take spans. `lead_ns` is what each call was left for its launch by a device's clock. `spoiled`
    names why the pair is discarded (clocks, a stranger); empty for a good one.
    """

    placement: int
    order: Order
    calls: int
    reference_ns: float
    candidate_ns: float
    reference_burst_ns: float = 0.0
    candidate_burst_ns: float = 0.0
    reference_span_ns: float = 0.0
    candidate_span_ns: float = 0.0
    lead_ns: int = 0
    spoiled: str = ""

    @property
    def log_ratio(self) -> float:
        """Log of how many times faster the candidate's turn was."""
        return math.log(self.reference_ns / self.candidate_ns)

    @property
    def possible(self) -> bool:
        """Whether both native times are positive and finite."""
        return all(math.isfinite(t) and t > 0 for t in (self.reference_ns, self.candidate_ns))


IMPOSSIBLE = "impossible time"


def checked(pair: Pair) -> Pair:
    """The pair, spoiled when a native time is not positive and finite, so that no arithmetic meets such a time."""
    return pair if pair.possible or pair.spoiled else replace(pair, spoiled=IMPOSSIBLE)


@dataclass(frozen=True)
class PlacementHistory:
    """Variance of placement means beyond the pairs' own noise, in log units, pooled from A/A runs on a device type."""

    variance_log: float
    degrees: int

    @property
    def enough(self) -> bool:
        """Whether it is known well enough to stand for the placements of one timing."""
        return self.degrees >= MIN_HISTORY_DEGREES


@dataclass(frozen=True)
class Estimate:
    """A log speedup with the half-width of its interval."""

    mean_log: float
    half_width_log: float
    degrees: float
    pairs: int
    placements: int
    placement_sd_log: float
    order_effect_log: float
    """Mean log ratio of pairs with the reference first minus that of the others: health, not part of the interval."""

    @property
    def speedup(self) -> float:
        return math.exp(self.mean_log)

    @property
    def low(self) -> float:
        return math.exp(self.mean_log - self.half_width_log)

    @property
    def high(self) -> float:
        return math.exp(self.mean_log + self.half_width_log)


def trimmed_mean(values: Sequence[float], trim: float = TRIM) -> tuple[float, float, int]:
    """Trimmed mean, its standard error from the winsorised variance, and the degrees of freedom (Yuen 1974).

    Raises ValueError for fewer than two values.
    """
    n = len(values)
    if n < 2:
        raise ValueError("a trimmed mean with its error needs at least two values")
    ordered = sorted(values)
    cut = int(trim * n)
    kept = n - 2 * cut
    mean = math.fsum(ordered[cut : n - cut]) / kept
    clipped = winsorised(values, trim)
    return mean, math.sqrt(_variance(clipped) * (n - 1) / (kept * (kept - 1))), kept - 1


def winsorised(values: Sequence[float], trim: float = TRIM) -> list[float]:
    """The values in their order, the `trim` share at either end pulled in to the nearest kept value."""
    ordered = sorted(values)
    cut = int(trim * len(ordered))
    low, high = ordered[cut], ordered[len(ordered) - cut - 1]
    return [min(max(value, low), high) for value in values]


def estimate(pairs: Sequence[Pair], confidence: float = 0.98, history: PlacementHistory | None = None) -> Estimate:
    """The log speedup of the good pairs with its interval; raises ValueError for fewer than two good pairs.

    Placements (fresh allocations) are a random effect. With enough history the variance of the mean is that of the
    pairs plus the pooled placement variance over the number of placements; else it is the larger of the pairs' own and
    the one between placement means, each with its own degrees of freedom. Fewer than three placements show no variance:
    then one is assumed. What the order of a pair adds to its ratio, the same in every pair, is taken out of both orders
    alike: on an accelerator the arm that comes first finds it in another state.
    """
    good = [pair for pair in pairs if not pair.spoiled]
    logs, taken = _without_order(good)
    mean, error, degrees = trimmed_mean(logs)
    degrees -= taken
    places = sorted({pair.placement for pair in good})
    between, between_degrees = _between_placements(good, logs)
    variance, used = error**2, float(degrees)
    if history is not None and history.enough:
        variance += history.variance_log / len(places)
    elif len(places) < MIN_PLACEMENTS_WITH_HISTORY:
        variance += ASSUMED_PLACEMENT_SD_LOG**2 / len(places)
    elif between > variance:
        variance, used = between, float(between_degrees)
    half = t_quantile((1 + confidence) / 2, max(1.0, used)) * math.sqrt(variance)
    return Estimate(
        mean_log=mean,
        half_width_log=half,
        degrees=used,
        pairs=len(good),
        placements=len(places),
        placement_sd_log=math.sqrt(max(0.0, (between - error**2) * len(places))),
        order_effect_log=_order_effect(good),
    )


def _without_order(pairs: Sequence[Pair]) -> tuple[list[float], int]:
    """Log ratios without half the difference between both orders' trimmed means; and how many effects were taken out.

    Pairs come in blocks of one of each order, so that this hardly moves their mean.
    """
    logs = [pair.log_ratio for pair in pairs]
    orders = [1 if pair.order == "reference_first" else -1 for pair in pairs]
    groups = [[log for log, order in zip(logs, orders, strict=True) if order == sign] for sign in (1, -1)]
    if min(len(group) for group in groups) < ORDER_PAIRS:
        return logs, 0
    first, second = (trimmed_mean(group)[0] for group in groups)
    return [log - order * (first - second) / 2 for log, order in zip(logs, orders, strict=True)], 1


def between_processes_log(pairs: Sequence[Pair]) -> float:
    """Half-width, in log units, of what the pairs cannot show of two processes; 0 but by a device's clock."""
    times = [min(pair.reference_ns, pair.candidate_ns) / pair.calls for pair in pairs if pair.lead_ns]
    return math.log1p(BETWEEN_PROCESSES_NS / sorted(times)[len(times) // 2]) if times else 0.0


def _between_placements(pairs: Sequence[Pair], logs: Sequence[float]) -> tuple[float, int]:
    """Variance of the mean of placement means (winsorised pairs), and its degrees of freedom; 0 for one placement."""
    n = len(pairs)
    cut = int(TRIM * n)
    groups: dict[int, list[float]] = {}
    for pair, value in zip(pairs, winsorised(logs), strict=True):
        groups.setdefault(pair.placement, []).append(value)
    means = [math.fsum(group) / len(group) for group in groups.values()]
    if len(means) < 2:
        return 0.0, 1
    shrink = n / (n - 2 * cut)
    return _variance(means) * shrink**2 / len(means), len(means) - 1


def _order_effect(pairs: Sequence[Pair]) -> float:
    first = [pair.log_ratio for pair in pairs if pair.order == "reference_first"]
    second = [pair.log_ratio for pair in pairs if pair.order == "candidate_first"]
    if not first or not second:
        return 0.0
    return math.fsum(first) / len(first) - math.fsum(second) / len(second)


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def placement_history(effects: Iterable[tuple[float, int]]) -> PlacementHistory | None:
    """Pools the placement variance of A/A runs (the reference against itself); None without two placements anywhere.

    `effects` are each run's `Estimate.placement_sd_log` and `placements`.
    """
    total, degrees = 0.0, 0
    for sd_log, placements in effects:
        if placements >= 2:
            total += sd_log**2 * (placements - 1)
            degrees += placements - 1
    return PlacementHistory(total / degrees, degrees) if degrees else None


@dataclass(frozen=True)
class Audit:
    """Whether untrimmed figures, the first calls included, agree with the estimate; else the lowest of them scores."""

    agrees: bool
    burst_log: float
    untrimmed_log: float
    scored_log: float


def audit(pairs: Sequence[Pair], result: Estimate) -> Audit:
    """Compares burst totals and the untrimmed mean with the trimmed estimate.

    They agree when each lies within the estimate's half-width plus its own error at the same confidence (a t value of
    2.5). What a candidate saves by being slow on dropped or trimmed calls is lost again here.
    """
    good = [pair for pair in pairs if not pair.spoiled]
    logs = [pair.log_ratio for pair in good]
    untrimmed = math.fsum(logs) / len(logs)
    untrimmed_error = math.sqrt(_variance(logs) / len(logs))
    burst, burst_error = _burst_ratio(good)
    candidates = [(untrimmed, untrimmed_error), (burst, burst_error)]
    apart = [log for log, error in candidates if abs(log - result.mean_log) > result.half_width_log + 2.5 * error]
    return Audit(
        agrees=not apart,
        burst_log=burst,
        untrimmed_log=untrimmed,
        scored_log=min([result.mean_log, *apart]),
    )


def _burst_ratio(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Log ratio of the summed bursts, and its standard error (delta method)."""
    reference = [pair.reference_burst_ns or pair.reference_ns for pair in pairs]
    candidate = [pair.candidate_burst_ns or pair.candidate_ns for pair in pairs]
    total_reference, total_candidate = math.fsum(reference), math.fsum(candidate)
    n = len(pairs)
    parts = [r * n / total_reference - c * n / total_candidate for r, c in zip(reference, candidate, strict=True)]
    return math.log(total_reference / total_candidate), math.sqrt(_variance(parts) / n)


def with_alone(facts: TimerFacts, alone: Sequence[Pair]) -> TimerFacts:
    """The facts with what turns of one call show by the judge's clock."""
    seen = timer_facts(alone)
    update = {"alone_turns": seen.turns, "alone_log": seen.span_log, "alone_error_log": seen.span_error_log}
    return facts.model_copy(update=update)


def timer_facts(pairs: Sequence[Pair], *, slowdown_log: float = 0.0, slowdown_error_log: float = 0.0) -> TimerFacts:
    """The worker's native times against the judge's spans.

    A turn's span is its native burst plus an overhead that both arms pay. What the candidate's overhead has more than
    the reference's, in the trimmed mean, is time that its native timer did not show; added to its claim it gives the
    time that cannot be forged. Overheads are taken at the mean number of calls: delivery, and time that is hidden, grow
    with the calls. The error is the scatter of both overheads, the candidate's counted up to three times
    the reference's, so that it cannot widen the error at will, plus an allowance for what differs between two
    processes.
    """
    good = [pair for pair in pairs if not pair.spoiled and pair.candidate_span_ns > 0]
    launched_ahead = any(pair.lead_ns for pair in good)
    facts = TimerFacts(
        turns=len(good),
        launched_ahead=launched_ahead,
        reference_slowdown_log=slowdown_log,
        slowdown_error_log=slowdown_error_log,
        missing_turns=sum(pair.spoiled == IMPOSSIBLE for pair in pairs),
    )
    if len(good) < 2:
        return facts
    own_overheads, other_overheads = (
        _levelled([pair.calls for pair in good], overheads)
        for overheads in zip(*(_overheads(pair) for pair in good), strict=True)
    )
    own, own_error, degrees = trimmed_mean(own_overheads, OVERHEAD_TRIM)
    other, other_error, _ = trimmed_mean(other_overheads, OVERHEAD_TRIM)
    scatter = math.hypot(own_error, min(other_error, 3 * own_error))
    error_ns = t_quantile(0.99, degrees) * scatter + SYSTEMATIC_NS + (SYSTEMATIC_SHARE * own if launched_ahead else 0)
    reference = math.fsum(pair.reference_burst_ns or pair.reference_ns for pair in good) / len(good)
    claimed = math.fsum(pair.candidate_burst_ns or pair.candidate_ns for pair in good) / len(good)
    native = math.log(reference / claimed)
    seen = claimed + other - own
    quiet = claimed + sorted(other_overheads)[len(good) // 4] - sorted(own_overheads)[len(good) // 4]
    if min(seen, quiet) <= error_ns:
        unresolved = {"native_log": native, "span_log": native, "quiet_log": native, "span_error_log": UNRESOLVED_LOG}
        return facts.model_copy(update=unresolved)
    return facts.model_copy(
        update={
            "native_log": native,
            "span_log": math.log(reference / seen),
            "quiet_log": math.log(reference / quiet),
            "span_error_log": error_ns / seen,
        }
    )


def _levelled(calls: Sequence[int], values: Sequence[float]) -> list[float]:
    """The values at the mean number of calls, by least squares; as they are where the number never changes."""
    mean = math.fsum(calls) / len(calls)
    spread = math.fsum((count - mean) ** 2 for count in calls)
    if spread == 0:
        return list(values)
    slope = math.fsum((count - mean) * value for count, value in zip(calls, values, strict=True)) / spread
    return [value - slope * (count - mean) for count, value in zip(calls, values, strict=True)]


def _overheads(pair: Pair) -> tuple[float, float]:
    """Span minus native burst of the reference's and the candidate's turn, in nanoseconds."""
    return (
        pair.reference_span_ns - (pair.reference_burst_ns or pair.reference_ns),
        pair.candidate_span_ns - (pair.candidate_burst_ns or pair.candidate_ns),
    )
