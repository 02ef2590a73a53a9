"""From an evaluation to a reward.

Invariants: a fault of the infrastructure is neither rewarded nor punished (None: left out of its group); a failure of
the policy has its configured reward; a copy of a shown exemplar earns what a failure earns, however fast it is.
"""

from __future__ import annotations

import math

from learner.config import RewardConfig
from tasks.records import Measurement, ScoredSample

SAME_FORMULA = "same_formula"
"""Label of a candidate that computes the reference's own formula with the framework's own operations."""


def reward_of(scored: ScoredSample, config: RewardConfig) -> float | None:
    """The sample's reward, or None when it is left out: cancelled, cut off by an update, or unscored."""
    evaluation = scored.evaluation
    if evaluation is None or evaluation.outcome == "unscored" or scored.sample.finish_reason == "abort":
        return None
    if scored.copy_of:
        return config.rejected if config.copy_ is None else config.copy_
    if scored.sample.candidate is None:
        return config.rejected if config.unreadable is None else config.unreadable
    if evaluation.outcome == "rejected" or evaluation.measurement is None:
        return config.rejected
    speedup = paid_speedup(evaluation.measurement, config)
    if SAME_FORMULA in evaluation.labels:
        speedup = min(speedup, config.same_formula_cap)
    return math.log(speedup) if config.shape == "log_speedup" else speedup


def paid_speedup(measurement: Measurement, config: RewardConfig) -> float:
    """The speedup that counts: the interval's lower end where the configuration says so, else the estimate."""
    lower = config.lower_end == "always" or (config.lower_end == "auto" and measurement.protocol == "reward")
    return measurement.ci_low if lower else measurement.speedup
