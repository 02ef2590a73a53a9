"""How much generation may be dispatched: the staleness capacity of AReaL and SkyRL as a pure state machine.

With B groups per optimizer step, at most `max_staleness` steps may lie between the policy version that a group was
dispatched under and the step that trains on it. When groups are trained in the order in which they were accepted, that
holds if the number ever dispatched and still counted never exceeds (max_staleness + version + 1) * B, where `version`
counts finished optimizer steps (AReaL, section 5.1, with its version counted from 0).

Invariants: submitted = running + accepted + dropped; accepted = trained + withdrawn + waiting; no count is negative. A
group that leaves without being trained gives its place back, else a run of unusable groups would stop generation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


class StalenessError(ValueError):
    """A transition that the counts do not allow: the caller has lost or doubled a group."""


@dataclass(frozen=True)
class StalenessState:
    """Counts of groups. Each transition returns the next state; none blocks or reads a clock."""

    batch: int
    """Groups of one optimizer step."""
    max_staleness: int
    concurrency: int
    """Most groups running at once."""
    version: int = 0
    """Optimizer steps finished."""
    running: int = 0
    accepted: int = 0
    """Groups completed and usable when they completed, over the whole run; less those withdrawn since."""
    submitted: int = 0
    dropped: int = 0
    """Groups that left unusable: cancelled, or withdrawn after acceptance."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.concurrency < 1 or self.max_staleness < 0:
            raise StalenessError("batch and concurrency must be at least 1, max_staleness at least 0")
        if min(self.version, self.running, self.accepted, self.submitted, self.dropped) < 0:
            raise StalenessError(f"a count is negative: {self}")

    @property
    def capacity(self) -> int:
        """Groups that may be dispatched now; never negative."""
        by_staleness = (self.max_staleness + self.version + 1) * self.batch - (self.accepted + self.running)
        return max(0, min(by_staleness, self.concurrency - self.running))

    def submit(self, count: int = 1) -> StalenessState:
        """`count` groups were dispatched; StalenessError beyond the capacity."""
        if not 0 <= count <= self.capacity:
            raise StalenessError(f"{count} groups were dispatched where {self.capacity} may be")
        return replace(self, running=self.running + count, submitted=self.submitted + count)

    def accept(self, count: int = 1) -> StalenessState:
        """`count` running groups completed and can be trained on."""
        self._has("running", self.running, count)
        return replace(self, running=self.running - count, accepted=self.accepted + count)

    def drop(self, count: int = 1) -> StalenessState:
        """`count` running groups left without being usable: cancelled, below quorum, zero variance."""
        self._has("running", self.running, count)
        return replace(self, running=self.running - count, dropped=self.dropped + count)

    def withdraw(self, count: int = 1) -> StalenessState:
        """`count` accepted groups will not be trained on after all: the learner found them stale or unusable."""
        self._has("accepted", self.accepted, count)
        return replace(self, accepted=self.accepted - count, dropped=self.dropped + count)

    def step(self, version: int) -> StalenessState:
        """The learner has finished `version` steps in all."""
        if version < self.version:
            raise StalenessError(f"version {version} is before {self.version}: resume with `resumed`")
        return replace(self, version=version)

    @classmethod
    def resumed(
        cls, *, batch: int, max_staleness: int, concurrency: int, version: int, waiting: int = 0
    ) -> StalenessState:
        """State after a restart: `version` steps count as trained, `waiting` accepted groups lie in the stream."""
        accepted = version * batch + waiting
        return cls(batch, max_staleness, concurrency, version, accepted=accepted, submitted=accepted)

    def _has(self, what: str, have: int, count: int) -> None:
        if not 0 <= count <= have:
            raise StalenessError(f"{count} {what} groups were reported where there are {have}")
