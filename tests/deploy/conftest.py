"""A run's outside in memory: a store that survives coordinators, and workers that die on command."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.graph.events import ControlMeasured, Event, KernelConfirmed, SampleLeft, SeedEvaluated, VersionPublished
from deploy.graph.handles import Drawn, Handles, PromptRefused, WorkerLost
from deploy.graph.ledger import sample_id
from deploy.graph.state import Group
from learner.loop import Learned, Standing


@dataclass
class World:
    """What outlives a coordinator: the stream, the store's groups, the learner's checkpoints."""

    seed: int = 0
    fault_rate: float = 0.0
    """Chance that a call of a worker dies."""
    refuse: tuple[str, ...] = ()
    """Tasks whose prompt does not fit."""
    zero_variance: tuple[int, ...] = ()
    """Ordinals of groups that the learner drops."""
    events: list[Event] = field(default_factory=list)
    groups: dict[str, dict[int, SampleLeft]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    records: int = 0
    epoch: int = 0
    fates: dict[str, str] = field(default_factory=dict)
    step: int = 0
    checkpoint: tuple[int, dict[str, str]] = (0, {})
    busy: dict[str, int] = field(default_factory=lambda: {"generate": 0, "evaluate": 0, "learn": 0})
    overlaps: int = 0
    calls: list[str] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    """How many samples were on record when a sample was last asked for."""
    asleep: bool = False
    drawn_asleep: int = 0
    evaluated_awake: int = 0
    groups_per_step: int = 2
    published: int = -1
    measured_late: int = 0
    """Held-out groups drawn under another version than theirs."""
    controls: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def handles(self) -> Handles:
        """Fresh handles, as a new coordinator gets them."""
        return Handles(FakeJournal(self), FakePrompts(self), FakeGenerators(self), FakeScorers(self), FakeLearner(self))

    async def tick(self) -> None:
        """Lets other tasks run, for a random number of rounds."""
        for _ in range(self.rng.randint(0, 3)):
            await asyncio.sleep(0)

    def maybe_die(self, what: str) -> None:
        if self.rng.random() < self.fault_rate:
            raise WorkerLost(what)

    def unscored(self, index: int) -> bool:
        """Whether a sample of this index never gets an outcome."""
        return False

    def enter(self, role: str) -> None:
        self.busy[role] += 1
        if sum(count > 0 for count in self.busy.values()) > 1:
            self.overlaps += 1

    def record(self, group: Group, index: int, event: SampleLeft) -> SampleLeft:
        """Idempotent by sample: what is on record stands."""
        samples = self.groups[group.id]
        if index not in samples:
            samples[index] = event
            self.records += 1
        return samples[index]

    def complete(self) -> list[str]:
        return [name for name, samples in self.groups.items() if len(samples) == self.sizes[name]]


@dataclass
class FakeJournal:
    world: World

    async def append(self, event: Event) -> None:
        await self.world.tick()
        self.world.events.append(event)

    async def events(self) -> list[Event]:
        return list(self.world.events)


@dataclass
class FakePrompts:
    world: World

    async def open_group(self, group: Group) -> None:
        await self.world.tick()
        if group.task_id in self.world.refuse:
            raise PromptRefused("prompt_too_long", f"{group.task_id} needs 900 of 512 tokens")
        self.world.groups.setdefault(group.id, {})
        self.world.sizes[group.id] = group.size

    async def recorded(self, group: Group) -> list[SampleLeft]:
        return list(self.world.groups.get(group.id, {}).values())

    async def cancel(self, group: Group, indices: Sequence[int]) -> None:
        await self.world.tick()
        for index in indices:
            name = sample_id(group.id, index)
            self.world.record(group, index, SampleLeft(sample_id=name, group_id=group.id, outcome="cancelled"))


@dataclass
class FakeGenerators:
    world: World

    async def draw(self, group: Group, indices: Sequence[int]) -> AsyncIterator[Drawn]:
        self.world.enter("generate")
        self.world.drawn_asleep += self.world.asleep
        self.world.calls.append(f"draw {group.id} {list(indices)}")
        if group.held_out:
            self.world.measured_late += self.world.published != group.policy_step
        self.world.asked |= {sample_id(group.id, index): self.world.records for index in indices}
        try:
            for index in indices:
                await self.world.tick()
                self.world.maybe_die("generator")
                yield Drawn(group.id, index, reference=f"text {index}", new_tokens=10)
        finally:
            self.world.busy["generate"] -= 1

    async def sleep(self) -> None:
        await self.world.tick()
        self.world.asleep = True

    async def wake(self) -> None:
        await self.world.tick()
        self.world.asleep = False


@dataclass
class FakeScorers:
    world: World

    async def score(self, group: Group, drawn: Drawn, *, last: bool) -> SampleLeft:
        self.world.enter("evaluate")
        self.world.evaluated_awake += not self.world.asleep
        try:
            await self.world.tick()
            self.world.maybe_die("evaluator")
            name = sample_id(group.id, drawn.index)
            if self.world.rng.random() < self.world.fault_rate or self.world.unscored(drawn.index):
                event = SampleLeft(sample_id=name, group_id=group.id, outcome="unscored", reason="device_fault")
                return self.world.record(group, drawn.index, event) if last else event
            event = SampleLeft(
                sample_id=name,
                group_id=group.id,
                outcome="accepted",
                label="new",
                speedup=1.2,
                ci_low=1.1 + drawn.index / 10,
            )
            event = self.world.record(group, drawn.index, event)
            self.world.maybe_die("evaluator after recording")
            return event
        finally:
            self.world.busy["evaluate"] -= 1

    async def give_up(self, group: Group, drawn: Drawn) -> SampleLeft:
        self.world.maybe_die("recorder")
        name = sample_id(group.id, drawn.index)
        event = SampleLeft(sample_id=name, group_id=group.id, outcome="unscored", reason="evaluator_lost")
        return self.world.record(group, drawn.index, event)

    async def confirm(self, group: Group, sample_id: str) -> KernelConfirmed:
        return KernelConfirmed(
            task_id=group.task_id, sample_id=sample_id, outcome="accepted", speedup=1.2, ci_low=1.1, ci_high=1.3
        )

    async def seed(self, task_id: str, device_type: str) -> Sequence[SeedEvaluated]:
        self.world.calls.append(f"seed {task_id}")
        return [SeedEvaluated(task_id=task_id, device_type=device_type, name="fused", outcome="accepted", speedup=1.1)]

    async def control(self, task_id: str, device_type: str) -> ControlMeasured | None:
        """Due at every second call."""
        self.world.controls += 1
        self.world.maybe_die("evaluator in a control")
        if self.world.controls % 2:
            return None
        return ControlMeasured(
            device_type=device_type,
            protocol="reward",
            task_id=task_id,
            outcome="accepted",
            measured=self.world.controls,
        )


@dataclass
class FakeLearner:
    world: World

    def _standing(self) -> Standing:
        return Standing(self.world.epoch, self.world.step, dict(self.world.fates))  # type: ignore[arg-type]

    def _die(self) -> None:
        """A restarted learner comes back from its checkpoint, in a new epoch."""
        self.world.epoch += 1
        self.world.step, fates = self.world.checkpoint
        self.world.fates = dict(fates)

    async def standing(self) -> Standing:
        await self.world.tick()
        return self._standing()

    async def learn(self, *, partial: bool) -> Learned:
        self.world.enter("learn")
        try:
            await self.world.tick()
            if self.world.rng.random() < self.world.fault_rate:
                self._die()
                raise WorkerLost("learner")
            free = [name for name in self.world.complete() if name not in self.world.fates]
            for name in free:
                if "-h" in name:
                    self.world.fates[name] = "measured"
                elif int(name.rsplit("-g", 1)[1]) in self.world.zero_variance:
                    self.world.fates[name] = "zero_variance"
            usable = [name for name in free if name not in self.world.fates][: self.world.groups_per_step]
            stepped = len(usable) == self.world.groups_per_step or (partial and bool(usable))
            if stepped:
                self.world.fates |= dict.fromkeys(usable, "trained")
                self.world.step += 1
                if self.world.rng.random() < 0.5:
                    await self.checkpoint()
            if self.world.rng.random() < self.world.fault_rate:
                self._die()
                raise WorkerLost("learner after its step")
            return Learned(self._standing(), stepped, {"loss": 0.1})
        finally:
            self.world.busy["learn"] -= 1

    async def publish(self) -> VersionPublished:
        await self.world.tick()
        self.world.asleep = False
        self.world.published = self.world.step
        return VersionPublished(epoch=self.world.epoch, step=self.world.step)

    async def checkpoint(self) -> None:
        self.world.checkpoint = (self.world.step, dict(self.world.fates))


@pytest.fixture(name="World", scope="session")
def world_class() -> type[World]:
    """The class itself, since a test module cannot import its conftest."""
    return World


@pytest.fixture(scope="session")
def below() -> Callable[[int], list[int]]:
    """Gives the numbers of all processes below a process."""

    def found(pid: int) -> list[int]:
        try:
            threads = list(Path(f"/proc/{pid}/task").iterdir())
            children = [int(word) for thread in threads for word in (thread / "children").read_text().split()]
        except OSError:
            return []
        return children + [one for child in children for one in found(child)]

    return found
