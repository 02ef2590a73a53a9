"""The two exact ledgers of a run, as pure state machines over its events.

Samples: dispatched = accepted + rejected + unscored + cancelled + in flight.
Groups:  formed = trained + stale + below quorum + zero variance + measured + pending.

Invariants: every sample and every group is counted once whatever is replayed or delivered twice (idempotent by id);
the first way out of a sample stands; the fate of a group in a later lineage of the learner replaces the earlier one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import get_args

from deploy.graph.events import Event, GroupFate, GroupFormed, GroupLeft, LineageStarted, SampleLeft, SampleOutcome
from tasks.errors import KontrastError

SAMPLE_OUTCOMES: tuple[str, ...] = get_args(SampleOutcome)
GROUP_FATES: tuple[str, ...] = get_args(GroupFate)


class LedgerError(KontrastError):
    """An event names a sample or group that was never dispatched, or the counts do not balance: a defect."""


def sample_id(group_id: str, index: int) -> str:
    """The id of one sample of a group."""
    return f"{group_id}/{index}"


@dataclass
class SampleLedger:
    """Every dispatched sample and the way it left."""

    in_flight: set[str] = field(default_factory=set)
    left: dict[str, str] = field(default_factory=dict)
    duplicates: int = 0
    """Events about samples that had left already; not an error, since delivery is at least once."""

    def dispatch(self, identifier: str) -> None:
        """Counts a sample as dispatched; a second dispatch of the same sample changes nothing."""
        if identifier not in self.left:
            self.in_flight.add(identifier)

    def leave(self, identifier: str, outcome: str) -> bool:
        """Takes a sample out of flight; False when it had left before. Raises LedgerError when never dispatched."""
        if identifier in self.left:
            self.duplicates += 1
            return False
        if identifier not in self.in_flight:
            raise LedgerError(f"sample {identifier} left as {outcome} but was never dispatched")
        self.in_flight.discard(identifier)
        self.left[identifier] = outcome
        return True

    def counts(self) -> dict[str, int]:
        """All six figures; `dispatched` is counted on its own, not summed from the others."""
        by_outcome = Counter(self.left.values())
        return {
            "dispatched": len(self.in_flight | self.left.keys()),
            **{outcome: by_outcome[outcome] for outcome in SAMPLE_OUTCOMES},
            "in_flight": len(self.in_flight),
        }


@dataclass
class GroupLedger:
    """Every formed group and what became of it."""

    sizes: dict[str, int] = field(default_factory=dict)
    fates: dict[str, tuple[int, str]] = field(default_factory=dict)
    """(epoch of the learner, fate) of each group that left."""

    def form(self, identifier: str, size: int) -> None:
        """Counts a group as formed; raises LedgerError when the same id comes back with another size."""
        if self.sizes.setdefault(identifier, size) != size:
            raise LedgerError(
                f"group {identifier} was formed with {self.sizes[identifier]} samples and again with {size}"
            )

    def leave(self, identifier: str, fate: str, epoch: int) -> bool:
        """Records a group's fate; False when a fate of the same or a later epoch stands."""
        if identifier not in self.sizes:
            raise LedgerError(f"group {identifier} left as {fate} but was never formed")
        standing = self.fates.get(identifier)
        if standing is not None and standing[0] >= epoch:
            return False
        self.fates[identifier] = (epoch, fate)
        return True

    def reopen(self, identifier: str, epoch: int) -> None:
        """A group whose fate belongs to a lost lineage is pending again."""
        standing = self.fates.get(identifier)
        if standing is not None and standing[0] < epoch:
            del self.fates[identifier]

    def pending(self) -> list[str]:
        """Ids of the groups without a fate, in the order they were formed."""
        return [identifier for identifier in self.sizes if identifier not in self.fates]

    def counts(self) -> dict[str, int]:
        """All seven figures."""
        by_fate = Counter(fate for _, fate in self.fates.values())
        return {
            "formed": len(self.sizes),
            **{fate: by_fate[fate] for fate in GROUP_FATES},
            "pending": len(self.pending()),
        }


@dataclass
class Ledger:
    """Both ledgers, fed with events."""

    samples: SampleLedger = field(default_factory=SampleLedger)
    groups: GroupLedger = field(default_factory=GroupLedger)

    @classmethod
    def replay(cls, events: Iterable[Event]) -> Ledger:
        """The ledgers after these events."""
        ledger = cls()
        for event in events:
            ledger.apply(event)
        return ledger

    def apply(self, event: Event) -> bool:
        """Takes one event in; False when it says nothing new. Events of other kinds are ignored."""
        if isinstance(event, GroupFormed):
            known = event.group_id in self.groups.sizes
            self.groups.form(event.group_id, event.size)
            for index in range(event.size):
                self.samples.dispatch(sample_id(event.group_id, index))
            return not known
        if isinstance(event, SampleLeft):
            return self.samples.leave(event.sample_id, event.outcome)
        if isinstance(event, GroupLeft):
            return self.groups.leave(event.group_id, event.fate, event.epoch)
        if isinstance(event, LineageStarted):
            for identifier in event.reopened:
                self.groups.reopen(identifier, event.epoch)
        return True

    def open_samples(self, group_id: str) -> list[int]:
        """Indices of a group's samples that are still in flight."""
        size = self.groups.sizes.get(group_id, 0)
        return [index for index in range(size) if sample_id(group_id, index) in self.samples.in_flight]

    def check(self) -> None:
        """Raises LedgerError when a ledger does not balance."""
        samples, groups = self.samples.counts(), self.groups.counts()
        for total, counts in (("dispatched", samples), ("formed", groups)):
            parts = {name: count for name, count in counts.items() if name != total}
            if counts[total] != sum(parts.values()):
                listed = " + ".join(f"{count} {name}" for name, count in parts.items())
                raise LedgerError(f"the ledger does not balance: {counts[total]} {total}, but {listed}")
        dispatched, held = samples["dispatched"], sum(self.groups.sizes.values())
        if dispatched != held:
            raise LedgerError(f"{dispatched} samples were dispatched, but the groups formed hold {held}")
