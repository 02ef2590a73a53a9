"""CUDA-L1's measuring rules to the letter (arXiv 2507.14111, reward section), as named constants.

1. a dedicated device; 2. paired execution, order random per round; 3. a time budget instead of a count of runs; 4.
seven buckets of single-run scores, refused when the variance of their means exceeds 0.005; 5. the score is the median
of the bucket means; 6. rounding to two decimals towards 1; 7. a second device of the same type within 10 % for large
scores. What the paper leaves open: scores are assigned to buckets in consecutive runs of equal length.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics

from evaluator.timing.plans import Plan, Stop, TimingResult
from evaluator.timing.quantiles import t_quantile
from evaluator.timing.statistics import Order, Pair, checked
from tasks.records.evaluation import Measurement
from tasks.records.evaluation import Protocol as ProtocolName

DEDICATED_DEVICE = True
RANDOM_ORDER_EACH_ROUND = True
WINDOW_S = 30 * 60.0
REPORT_WINDOW_S = 20 * 60.0
BUCKETS = 7
MAX_BUCKET_VARIANCE = 0.005
ROUNDING_DECIMALS = 2
STRICT_ABOVE = 3.0
STRICT_ABOVE_TIMES_BEST = 2.0
SECOND_DEVICE_AGREEMENT = 0.10
CONFIDENCE = 0.98


def conservative(speedup: float) -> float:
    """Two decimals, towards 1: 1.118 becomes 1.11 and 0.992 becomes 1.00."""
    factor = 10**ROUNDING_DECIMALS
    if speedup >= 1:
        return math.floor(speedup * factor + 1e-9) / factor
    return math.ceil(speedup * factor - 1e-9) / factor


def bucket_means(scores: list[float]) -> list[float]:
    """Means of seven consecutive runs of scores of nearly equal length; raises ValueError for fewer than seven."""
    if len(scores) < BUCKETS:
        raise ValueError(f"{len(scores)} rounds do not fill {BUCKETS} buckets")
    bounds = [len(scores) * k // BUCKETS for k in range(BUCKETS + 1)]
    return [statistics.fmean(scores[low:high]) for low, high in itertools.pairwise(bounds)]


def needs_second_device(speedup: float, best: float | None) -> bool:
    """Rule 7: above 3, or above twice the task's best so far."""
    return speedup > STRICT_ABOVE or (best is not None and speedup > STRICT_ABOVE_TIMES_BEST * best)


class PaperProtocol:
    """Rounds of one call of each arm, in random order, for a fixed window."""

    name: ProtocolName = "paper"

    def __init__(self, rng: random.Random, window_s: float | None = None) -> None:
        self.pairs: list[Pair] = []
        self.window_s = WINDOW_S if window_s is None else window_s
        self._rng = rng

    def next(self, elapsed_s: float) -> Plan | Stop:
        good = sum(not pair.spoiled for pair in self.pairs)
        if elapsed_s >= self.window_s and good >= BUCKETS:
            return Stop("window")
        order: Order = "reference_first" if self._rng.random() < 0.5 else "candidate_first"
        return Plan(pair=len(self.pairs), placement=0, order=order, calls=2)

    def feed(self, pair: Pair) -> None:
        self.pairs.append(checked(pair))

    def result(self, device_type: str = "cpu") -> TimingResult:
        good = [pair for pair in self.pairs if not pair.spoiled]
        means = bucket_means([pair.reference_ns / pair.candidate_ns for pair in good])
        score = conservative(statistics.median(means))
        variance = statistics.variance(means)
        half = t_quantile((1 + CONFIDENCE) / 2, BUCKETS - 1) * math.sqrt(variance / BUCKETS)
        middle = statistics.fmean(means)
        measurement = Measurement(
            speedup=max(score, 0.01),
            ci_low=max(min(middle - half, score), 1e-6),
            ci_high=max(middle + half, score),
            confidence=CONFIDENCE,
            reference_ms=statistics.median(pair.reference_ns / pair.calls for pair in good) / 1e6,
            candidate_ms=statistics.median(pair.candidate_ns / pair.calls for pair in good) / 1e6,
            pairs=len(good),
            placements=1,
            protocol=self.name,
            device_type=device_type,
            stopped="window",
        )
        unstable = ""
        if variance > MAX_BUCKET_VARIANCE:
            unstable = f"the variance of the bucket means is {variance:.3g}, more than {MAX_BUCKET_VARIANCE}"
        spoiled = len(self.pairs) - len(good)
        return TimingResult(measurement=measurement, unstable=unstable, spoiled_pairs=spoiled)
