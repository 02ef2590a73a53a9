"""Running mean and deviation of all rewards of a run; part of its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RewardMoments:
    """Count, mean and summed squared deviation of all rewards so far: the scale of smoothing `running`."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_rewards(self, rewards: Sequence[float]) -> RewardMoments:
        """The moments after these rewards (Welford's update)."""
        count, mean, squares = self.count, self.mean, self.squares
        for reward in rewards:
            count += 1
            delta = reward - mean
            mean += delta / count
            squares += delta * (reward - mean)
        return RewardMoments(count, mean, squares)

    @property
    def deviation(self) -> float:
        """Population standard deviation; 0 before the first reward."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0
