"""What becomes of a scored group: each leaves exactly once, with its ledger word.

Pure. Invariants: the words are checked in the order stale, below quorum, zero variance, so that a group has one reason;
only scored samples have a reward, and only they count for the quorum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from learner.config import LearnerConfig
from learner.errors import GroupLeftTwice
from learner.reward import reward_of, success_of, timing_noise
from tasks.records import PolicyVersion, ScoredGroup, ScoredSample

Fate = Literal["trained", "stale", "below_quorum", "zero_variance", "measured"]
"""`measured` is of a group that was never meant to be trained on."""

MIN_QUORUM = 2
"""One sample alone has no baseline."""


@dataclass(frozen=True)
class Lineage:
    """The learner's own history: where each of its epochs began.

    A restart goes back to a checkpoint, so versions of an earlier epoch beyond that step are on a branch that was lost.
    """

    version: PolicyVersion
    starts: Mapping[int, int]
    """Step at which each epoch of this lineage began."""

    def distance(self, version: PolicyVersion) -> int:
        """Optimizer steps between a sampler's version and the present one, through the point where they parted."""
        later = [start for epoch, start in self.starts.items() if epoch > version.epoch]
        parted = min([version.step, self.version.step, *later])
        return (version.step - parted) + (self.version.step - parted)


@dataclass(frozen=True)
class JudgedGroup:
    """A group with its rewards (None: left out) and its word; `trained` here means fit to be trained on."""

    group: ScoredGroup
    rewards: tuple[float | None, ...]
    fate: Fate
    staleness: int
    noise: float = 0.0
    """Deviation of the timing noise in its rewards."""

    def scored(self) -> list[tuple[ScoredSample, float]]:
        """The samples that have a reward, with it."""
        pairs = zip(self.group.samples, self.rewards, strict=True)
        return [(sample, reward) for sample, reward in pairs if reward is not None]

    def by_turn(self, discount: float) -> list[list[tuple[ScoredSample, float]]]:
        """For each turn, the samples and what they earn from there on: own reward plus discounted later ones.

        Conversations that the infrastructure cut short are left out whole: their returns are not known.
        """
        turns = self.group.prompt.turns
        if turns == 1:
            return [self.scored()]
        width = len(self.group.samples) // turns
        known = {sample.sample.index: (sample, reward) for sample, reward in self.scored()}
        found: list[list[tuple[ScoredSample, float]]] = [[] for _ in range(turns)]
        for first in range(width):
            indices = range(first, width * turns, width)
            if any(index not in known for index in indices):
                continue
            earned = 0.0
            for turn in reversed(range(turns)):
                sample, reward = known[indices[turn]]
                earned = reward + discount * earned
                found[turn].append((sample, earned))
        return found


def judge_group(group: ScoredGroup, lineage: Lineage, config: LearnerConfig) -> JudgedGroup:
    """The group's rewards in this stage and its word, at the learner's present version."""
    binary = config.stage == "self_supervised"
    rewards = tuple(success_of(s) if binary else reward_of(s, config.reward) for s in group.samples)
    staleness = max(
        (
            lineage.distance(version)
            for sample, value in zip(group.samples, rewards, strict=True) if value is not None
            for version in sample.sample.policy_versions
        ),
        default=0,
    )  # fmt: skip
    judged = JudgedGroup(group, rewards, "trained", staleness, timing_noise(group.samples, config.reward))
    if group.prompt.held_out:
        return replace(judged, fate="measured")
    if config.stage == "frozen":
        return judged
    if staleness > config.groups.max_staleness:
        return replace(judged, fate="stale")
    known = judged.by_turn(0.0)[0]
    if len(known) < quorum(len(group.samples) // group.prompt.turns, config.groups.quorum):
        return replace(judged, fate="below_quorum")
    if _without_gradient(judged, config):
        return replace(judged, fate="zero_variance")
    return judged


def _without_gradient(judged: JudgedGroup, config: LearnerConfig) -> bool:
    """True when the group can teach nothing: no success in stage 2, no difference in any turn in stage 3."""
    if config.stage == "self_supervised":
        return all(reward == 0.0 for _, reward in judged.scored())
    if config.grpo.zero_variance == "keep":
        return False
    earned = [[value for _, value in turn] for turn in judged.by_turn(config.grpo.turn_discount)]
    return all(max(turn) - min(turn) <= config.grpo.zero_variance_below for turn in earned)


def quorum(size: int, share: float) -> int:
    """Scored samples, or whole conversations, that a group of `size` needs: this share, and two."""
    return max(MIN_QUORUM, math.ceil(size * share))


class Fates:
    """The words of all groups that left this lineage; each group once."""

    def __init__(self, fates: Mapping[str, Fate] | None = None) -> None:
        self._fates: dict[str, Fate] = dict(fates or {})

    def leave(self, group_id: str, fate: Fate) -> None:
        """Records that a group left; raises GroupLeftTwice when it had left before."""
        if group_id in self._fates:
            raise GroupLeftTwice(f"group {group_id} left as {fate} after it had left as {self._fates[group_id]}")
        self._fates[group_id] = fate

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._fates

    def as_dict(self) -> dict[str, Fate]:
        """A copy: group id to word."""
        return dict(self._fates)

    def counts(self) -> dict[str, int]:
        """Groups by word."""
        return {word: sum(fate == word for fate in self._fates.values()) for word in get_args(Fate)}
