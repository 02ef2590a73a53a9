"""The state of a run as a pure function of its events: what a restarted coordinator knows, and what reports show.

Invariants: `apply` is the only way to change it; applying an event twice changes nothing; nothing here depends on the
clock, on randomness or on what the actors hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from deploy.graph.events import (
    ControlMeasured,
    CoordinatorStarted,
    Event,
    GroupFormed,
    GroupLeft,
    HeldOutMeasured,
    KernelConfirmed,
    LineageStarted,
    Phase,
    PhaseEntered,
    RunClosed,
    RunOpened,
    SampleLeft,
    SeedEvaluated,
    StepLearned,
    TaskSkipped,
    VersionPublished,
)
from deploy.graph.ledger import Ledger, sample_id


@dataclass(frozen=True)
class Group:
    """One formed group and where its samples are."""

    id: str
    task_id: str
    device_type: str
    size: int
    """Samples of all turns."""
    policy_step: int
    turns: int = 1
    held_out: str = ""
    """Held-out set that it measures; empty for one that is trained on."""
    exemplars: bool = True

    @property
    def width(self) -> int:
        """Samples of one turn: turn t of conversation i has index t x width + i."""
        return self.size // self.turns

    def before(self, index: int) -> int | None:
        """Index of the turn that a sample answers to; None in the first turn."""
        return index - self.width if index >= self.width else None

    def after(self, index: int) -> int | None:
        """Index of the turn after a sample; None in the last turn."""
        return index + self.width if index + self.width < self.size else None

    def samples(self) -> list[str]:
        """Ids of its samples."""
        return [sample_id(self.id, index) for index in range(self.size)]


@dataclass
class RunState:
    """Everything about a run that its events say."""

    run_id: str = ""
    config_digest: str = ""
    stage: str = "contrastive"
    incarnation: int = 0
    phase: Phase = "starting"
    ledger: Ledger = field(default_factory=Ledger)
    groups: dict[str, Group] = field(default_factory=dict)
    left: dict[str, SampleLeft] = field(default_factory=dict)
    """How each sample left, by sample id."""
    seeds: dict[tuple[str, str, str], SeedEvaluated] = field(default_factory=dict)
    """Seed kernels by task, device type and name."""
    confirmed: dict[str, KernelConfirmed] = field(default_factory=dict)
    """Confirmations by sample id."""
    controls: dict[tuple[str, str], ControlMeasured] = field(default_factory=dict)
    """The latest control by device type and protocol."""
    held_out: dict[tuple[int, str, str, bool], HeldOutMeasured] = field(default_factory=dict)
    """By step of the surviving lineage, set, device type and whether exemplars were shown."""
    skipped: dict[str, TaskSkipped] = field(default_factory=dict)
    epoch: int = 0
    step: int = 0
    """Optimizer steps of the surviving lineage."""
    published: tuple[int, int] = (0, 0)
    """(epoch, step) of the version that the generators hold."""
    steps: list[StepLearned] = field(default_factory=list)
    publications: list[VersionPublished] = field(default_factory=list)
    closed: str = ""
    seconds_by_phase: dict[str, float] = field(default_factory=dict)
    """Time in each phase that has ended, by the events' own clock."""
    phase_since_s: float = 0.0

    @classmethod
    def replay(cls, events: Iterable[Event]) -> RunState:
        """The state after these events."""
        state = cls()
        for event in events:
            state.apply(event)
        return state

    def apply(self, event: Event) -> None:
        """Takes one event in; repeated delivery changes nothing."""
        news = self.ledger.apply(event)
        match event:
            case RunOpened():
                self.run_id, self.config_digest, self.stage = event.run_id, event.config_digest, event.stage
            case CoordinatorStarted():
                self.incarnation, self.closed = max(self.incarnation, event.incarnation), ""
            case PhaseEntered():
                if self.phase_since_s:
                    spent = self.seconds_by_phase.get(self.phase, 0.0) + max(0.0, event.at_s - self.phase_since_s)
                    self.seconds_by_phase[self.phase] = spent
                self.phase, self.phase_since_s = event.phase, event.at_s
            case TaskSkipped():
                self.skipped.setdefault(event.task_id, event)
            case SeedEvaluated():
                self.seeds.setdefault((event.task_id, event.device_type, event.name), event)
            case GroupFormed() if news:
                self.groups[event.group_id] = Group(
                    event.group_id, event.task_id, event.device_type, event.size, event.policy_step, event.turns,
                    event.held_out, event.exemplars,
                )  # fmt: skip
            case SampleLeft() if news:
                self.left[event.sample_id] = event
            case KernelConfirmed():
                self.confirmed.setdefault(event.sample_id, event)
            case HeldOutMeasured():
                self.held_out.setdefault((event.step, event.name, event.device_type, event.exemplars), event)
            case ControlMeasured():
                self.controls[event.device_type, event.protocol] = event
            case RunClosed():
                self.closed = event.status
            case StepLearned() | VersionPublished() | LineageStarted() | GroupLeft() | GroupFormed() | SampleLeft():
                self._apply_learning(event)

    def _apply_learning(self, event: Event) -> None:
        if isinstance(event, LineageStarted) and event.epoch > self.epoch:
            self.epoch, self.step = event.epoch, event.step
            self.steps = [step for step in self.steps if step.step <= event.step]
            self.held_out = {key: value for key, value in self.held_out.items() if key[0] <= event.step}
        elif isinstance(event, StepLearned) and (event.epoch, event.step) > (self.epoch, self.step):
            self.epoch, self.step = event.epoch, event.step
            self.steps.append(event)
        elif isinstance(event, VersionPublished) and (event.epoch, event.step) >= self.published:
            self.published = (event.epoch, event.step)
            self.publications.append(event)

    def alive_groups(self) -> int:
        """Groups that a step used or may still use: what a staleness capacity counts against."""
        fates = self.ledger.groups.fates
        words = [fates[group.id][1] if group.id in fates else "pending" for group in self.training_groups()]
        return sum(word in ("trained", "measured", "pending") for word in words)

    def training_groups(self) -> list[Group]:
        """All but those that measure a held-out set, in the order they were formed."""
        return [group for group in self.groups.values() if not group.held_out]

    def ready_groups(self) -> list[str]:
        """Pending groups all of whose samples have left: what the learner can take."""
        pending = [name for name in self.ledger.groups.pending() if not self.groups[name].held_out]
        return [name for name in pending if not self.ledger.open_samples(name)]

    def unfinished_groups(self) -> list[Group]:
        """Groups with samples in flight: what a restarted coordinator dispatches again."""
        return [group for group in self.groups.values() if self.ledger.open_samples(group.id)]

    def groups_in_progress(self) -> int:
        """Groups for training with samples in flight."""
        return sum(bool(self.ledger.open_samples(group.id)) for group in self.training_groups())

    def outcomes(self) -> Counter[str]:
        """Samples that left, by outcome."""
        return Counter(event.outcome for event in self.left.values())

    def best(self, *, label: str = "new") -> dict[tuple[str, str], SampleLeft]:
        """The fastest accepted sample of each (task, device type) with this label, by the interval's lower end."""
        best: dict[tuple[str, str], SampleLeft] = {}
        for event in self.left.values():
            group = self.groups[event.group_id]
            key = (group.task_id, group.device_type)
            if event.outcome != "accepted" or event.label != label or group.held_out:
                continue
            if key not in best or (event.ci_low or 0.0) > (best[key].ci_low or 0.0):
                best[key] = event
        return best
