"""Which exemplars a prompt shows: CUDA-L1's Eq. 1 and the alternatives the paper compares it with.

A strategy sees the non-empty buckets of one shelf and answers with picks: a bucket and a place within it. It never
sees sources, and takes its randomness from the caller.

Choices that the paper leaves open, and ours:

- The mean over buckets that Eq. 1 subtracts changes nothing (a softmax is shift invariant); the largest is subtracted.
- Without replacement: the second bucket is drawn by Eq. 1 over the buckets that are left.
- Cold start: a task with one bucket gives one exemplar, a task with none gives none; two kernels of one bucket would
  be shown as a contrast that the measurement does not support.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from exemplar_store.buckets import Bucket


@dataclass(frozen=True)
class Pick:
    """One chosen exemplar: the bucket's index, and the place (from 0) among its exemplars by speedup."""

    bucket: int
    place: int


class Strategy(Protocol):
    """Chooses at most `count` different exemplars of a shelf."""

    @property
    def name(self) -> str:
        """Its name in the configuration."""
        ...

    def choose(self, buckets: Sequence[Bucket], count: int, rng: Random) -> list[Pick]:
        """Picks in the order drawn; fewer than `count` when the shelf has no more to choose from."""
        ...


def eq1_probabilities(means: Sequence[float], temperature: float) -> list[float]:
    """P(B_i) = exp(mean_i / tau) / sum_j exp(mean_j / tau) (CUDA-L1, Eq. 1); means of any size are safe."""
    if not means:
        return []
    top = max(means)
    weights = [math.exp((mean - top) / temperature) for mean in means]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def draw_distinct(means: Sequence[float], count: int, temperature: float, rng: Random) -> list[int]:
    """Positions of `count` distinct buckets, one after another by Eq. 1 over those left, in the order drawn.

    P(i then j) = p_i * p_j / (1 - p_i) for two. The softmax is taken anew over the rest, so that a first bucket with
    probability 1 in floating point still leaves a proper draw.
    """
    left = list(range(len(means)))
    drawn: list[int] = []
    while left and len(drawn) < count:
        probabilities = eq1_probabilities([means[position] for position in left], temperature)
        drawn.append(left.pop(_pick(probabilities, rng)))
    return drawn


def _pick(probabilities: Sequence[float], rng: Random) -> int:
    """A position with the given probability, by inversion."""
    point = rng.random()
    for position, probability in enumerate(probabilities):
        point -= probability
        if point < 0:
            return position
    return max(range(len(probabilities)), key=probabilities.__getitem__)  # rounding left a sliver above the last


@dataclass(frozen=True)
class Buckets:
    """Eq. 1: distinct buckets by softmax over their means, then one exemplar of each, uniformly."""

    temperature: float
    name: str = "buckets"

    def choose(self, buckets: Sequence[Bucket], count: int, rng: Random) -> list[Pick]:
        """See `Strategy.choose`."""
        positions = draw_distinct([bucket.mean for bucket in buckets], count, self.temperature, rng)
        return [Pick(buckets[at].index, rng.randrange(buckets[at].count)) for at in positions]


@dataclass(frozen=True)
class Uniform:
    """The baseline `random`: different exemplars, each equally likely, whatever their speedup."""

    name: str = "random"

    def choose(self, buckets: Sequence[Bucket], count: int, rng: Random) -> list[Pick]:
        """See `Strategy.choose`."""
        total = sum(bucket.count for bucket in buckets)
        return [_locate(buckets, rank) for rank in rng.sample(range(total), min(count, total))]


@dataclass(frozen=True)
class Nothing:
    """The baseline `none`: prompts without exemplars (plain GRPO)."""

    name: str = "none"

    def choose(self, buckets: Sequence[Bucket], count: int, rng: Random) -> list[Pick]:  # noqa: ARG002
        """See `Strategy.choose`."""
        return []


def _locate(buckets: Sequence[Bucket], rank: int) -> Pick:
    """The exemplar with this rank (from 0) over all buckets, lowest first."""
    for bucket in buckets:
        if rank < bucket.count:
            return Pick(bucket.index, rank)
        rank -= bucket.count
    raise IndexError(rank)


def create_strategy(name: str, temperature: float) -> Strategy:
    """The strategy of a configuration; raises KeyError for a name that StoreConfig does not admit.

    `islands` draws by Eq. 1 too, over the buckets of one island (see `islands`).
    """
    if name == "buckets":
        return Buckets(temperature)
    others: dict[str, Strategy] = {
        "islands": Buckets(temperature, "islands"), "random": Uniform(), "none": Nothing(),
    }  # fmt: skip
    return others[name]
