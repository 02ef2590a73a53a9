"""From an evaluation to a reward.

Invariants: a fault of the infrastructure is neither rewarded nor punished (None: left out of its group); a failure of
the policy has its configured reward; a copy of a shown exemplar earns what a failure earns, however fast it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import NormalDist

from learner.config import RewardConfig
from tasks.records import Measurement, ScoredSample

SAME_FORMULA = "same_formula"
"""Label of a candidate that computes the reference's own formula with the framework's own operations."""


def reward_of(scored: ScoredSample, config: RewardConfig) -> float | None:
    """The sample's reward, or None when it is left out: cancelled, cut off by an update, or unscored."""
    evaluation = scored.evaluation
    if evaluation is None or is_left_out(scored):
        return None
    if scored.copy_of:
        return config.rejected if config.copy_ is None else config.copy_
    if scored.sample.finish_reason == "length" and config.truncated is not None:
        return config.truncated
    if scored.sample.candidate is None:
        return config.rejected if config.unreadable is None else config.unreadable
    if evaluation.outcome == "rejected" or evaluation.measurement is None:
        return config.rejected
    speedup = paid_speedup(evaluation.measurement, config)
    if SAME_FORMULA in evaluation.labels:
        speedup = min(speedup, config.same_formula_cap)
    return math.log(speedup) if config.shape == "log_speedup" else speedup


def success_of(scored: ScoredSample) -> float | None:
    """Stage 2's reward: 1 for an accepted sample that copies nothing, 0 for any other, None when it is left out.

    Speed plays no part (CUDA-L1, section 2.2).
    """
    if is_left_out(scored):
        return None
    accepted = scored.evaluation is not None and scored.evaluation.outcome == "accepted"
    return float(accepted and not scored.copy_of)


def is_left_out(scored: ScoredSample) -> bool:
    """True for what the infrastructure broke: cancelled, unscored, or cut off by an update."""
    evaluation = scored.evaluation
    return evaluation is None or evaluation.outcome == "unscored" or scored.sample.finish_reason == "abort"


def timing_noise(samples: Iterable[ScoredSample], config: RewardConfig) -> float:
    """Standard deviation of the timing noise in accepted samples' rewards, in units of the reward; 0 without any.

    Root mean square of the deviations that the measurements' confidence intervals imply for a normal error.
    """
    variances = [
        _deviation(scored.evaluation.measurement, config) ** 2
        for scored in samples
        if scored.evaluation is not None and scored.evaluation.measurement is not None
        and scored.evaluation.outcome == "accepted" and not scored.copy_of
    ]  # fmt: skip
    return math.sqrt(sum(variances) / len(variances)) if variances else 0.0


def _deviation(measurement: Measurement, config: RewardConfig) -> float:
    low, high = measurement.ci_low, measurement.ci_high
    width = math.log(high / low) if config.shape == "log_speedup" else high - low
    return width / (2.0 * NormalDist().inv_cdf(0.5 + measurement.confidence / 2.0))


def paid_speedup(measurement: Measurement, config: RewardConfig) -> float:
    """The speedup that counts: the interval's lower end where the configuration says so, else the estimate."""
    return measurement.ci_low if config.pays_lower_end(measurement.protocol) else measurement.speedup
