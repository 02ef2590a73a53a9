"""The loop of a run: forms groups, has them drawn, scored and learned from, and writes every transition down first.

Invariants: the coordinator keeps nothing of its own: its state is its events, replayed at start; an event is appended
before the state changes; every sample of a formed group leaves once, whatever dies; where roles share a device they
take turns; every wait has a limit from the configuration that names what was waited for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from deploy.graph.events import (
    CoordinatorStarted,
    Event,
    GroupFormed,
    GroupLeft,
    Phase,
    PhaseEntered,
    RunClosed,
    RunOpened,
    SampleLeft,
    TaskSkipped,
)
from deploy.graph.handles import (
    Drawn,
    Handles,
    NothingToDo,
    PromptRefused,
    WaitedTooLong,
    WorkerLost,
)
from deploy.graph.held_out import figures_now, held_out_now
from deploy.graph.learning import Learning
from deploy.graph.ledger import sample_id
from deploy.graph.plan import RunPlan
from deploy.graph.schedule import next_target
from deploy.graph.state import Group, RunState
from deploy.graph.turns import Role, Turns
from deploy.graph.waits import within

_log = logging.getLogger(__name__)
PHASE_OF_ROLE: dict[Role, Phase] = {"generate": "generating", "evaluate": "evaluating", "learn": "learning"}


@dataclass(frozen=True)
class Order:
    """Samples of one group that are to be drawn: all missing ones of the first turn, or one of a later turn."""

    group: Group
    indices: tuple[int, ...]
    attempt: int = 1


class Coordinator:
    """One run, from its first event or from wherever an earlier coordinator left it, to its last."""

    def __init__(self, plan: RunPlan, handles: Handles, *, clock: Callable[[], float] = time.time) -> None:
        self.plan = plan
        self.state = RunState()
        self._handles = handles
        self._clock = clock
        self._turns = Turns(shared=plan.take_turns, quota=plan.turn_quota)
        self._to_draw: deque[Order] = deque()
        self._to_score: deque[tuple[Drawn, int]] = deque()
        self._jobs: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._learning = Learning(plan, handles.learner, self.state, self._emit)
        self._stopping = False
        self._asleep: bool | None = None

    def stop(self) -> None:
        """Asks the run to end in order: nothing new is dispatched, what is in flight finishes or is cancelled."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> RunState:
        """Runs to the end; returns the final state. Raises KontrastError where a person has to act."""
        await self._restore()
        try:
            await self._seed()
            await self._loop()
            await self._close()
        finally:
            await self._drop_jobs()
        return self.state

    async def _emit(self, event: Event) -> None:
        stamped = event.model_copy(update={"at_s": self._clock()})
        await within(self._handles.journal.append(stamped), self.plan.store_timeout_s, "the store to append", "store")
        self.state.apply(stamped)

    async def _enter(self, phase: Phase) -> None:
        if self.state.phase != phase:
            await self._emit(PhaseEntered(phase=phase))

    async def _restore(self) -> None:
        """Replays the stream, and brings what an earlier coordinator left half done back into the queues."""
        for event in await self._handles.journal.events():
            self.state.apply(event)
        if self.state.run_id and self.state.run_id != self.plan.run_id:
            raise ValueError(f"the stream is of run {self.state.run_id}, not of {self.plan.run_id}")
        if not self.state.run_id:
            await self._emit(
                RunOpened(run_id=self.plan.run_id, config_digest=self.plan.config_digest, stage=self.plan.stage)
            )
        await self._emit(CoordinatorStarted(incarnation=self.state.incarnation + 1))
        await self._learning.follow(await self._learning.standing())
        for group in self.state.unfinished_groups():
            for event in await self._handles.prompts.recorded(group):
                await self._leave(event)
            await self._order_what_is_open(group)
        await self._learning.publish()

    async def _order_what_is_open(self, group: Group) -> None:
        """Has the missing samples of a group drawn, each turn that answers to a scored one as an order of its own."""
        open_samples = self.state.ledger.open_samples(group.id)
        first = [index for index in open_samples if group.before(index) is None]
        if first:
            self._to_draw.append(Order(group, tuple(first)))
        for index in open_samples:
            before = group.before(index)
            event = None if before is None else self.state.left.get(sample_id(group.id, before))
            if before is not None and event is not None:
                await self._go_on(group, before, event.outcome)

    async def _go_on(self, group: Group, index: int, outcome: str) -> None:
        """After a sample left: its next turn is drawn, or leaves with it where there is no outcome to answer to."""
        following = group.after(index)
        if following is None or sample_id(group.id, following) in self.state.left:
            return
        if outcome in ("accepted", "rejected"):
            self._to_draw.append(Order(group, (following,)))
        else:
            await self._cancel(group, [following], "turn_lost")

    async def _seed(self) -> None:
        """Evaluates the seed kernels of every target once, before the first prompt."""
        done = {(task_id, device_type) for task_id, device_type, _ in self.state.seeds}
        targets = self._open_targets()
        if self.plan.held_out_seeds:
            targets += dict.fromkeys((prompt.task_id, prompt.device_type) for prompt in self.plan.held_out)
        missing = [target for target in targets if target not in done] if self.plan.seeds else []
        if not missing:
            return
        await self._enter("seeding")
        await self._let_sleep(True)
        places = asyncio.Semaphore(self.plan.concurrent_seeds)
        seeding = [asyncio.create_task(self._seed_one(*target, places)) for target in missing]
        try:
            await asyncio.gather(*seeding)
        finally:
            for task in seeding:
                task.cancel()

    async def _seed_one(self, task_id: str, device_type: str, places: asyncio.Semaphore) -> None:
        async with places:
            work = self._handles.scorers.seed(task_id, device_type)
            try:
                events = await within(work, self.plan.seed_timeout_s, f"the seed kernels of {task_id}", "seed")
            except PromptRefused as refused:
                await self._skip(task_id, refused)
                return
            for event in events:
                await self._emit(event)

    async def _skip(self, task_id: str, refused: PromptRefused) -> None:
        _log.warning("task %s is skipped (%s): %s", task_id, refused.reason, refused)
        await self._emit(TaskSkipped(task_id=task_id, reason=refused.reason, message=str(refused)))  # type: ignore[arg-type]

    async def _loop(self) -> None:
        while not self._finished():
            self._wake.clear()
            await self._start_what_may()
            if not self._jobs and not self._may_go_on():
                break
            await self._wait()
        if not self._stopping and not self._open_targets():
            reasons = "; ".join(f"{skip.task_id}: {skip.message}" for skip in self.state.skipped.values())
            raise NothingToDo(f"No task is left ({reasons}): choose other tasks, or raise rollout's token limits.")

    def _finished(self) -> bool:
        if self._stopping:
            return True
        return self.state.step >= self.plan.steps and not self._jobs and not self._evaluation_due()

    def _may_go_on(self) -> bool:
        return any(self._waiting().values())

    def _waiting(self) -> dict[Role, int]:
        """Units of work of each role that could start, turns aside."""
        return {
            "generate": len(self._to_draw) + self._new_groups(),
            "evaluate": len(self._to_score),
            "learn": int(self._learnable()),
        }

    def _new_groups(self) -> int:
        """Groups that may be formed now: the staleness capacity, within what the run still needs."""
        if self._stopping or self.state.step >= self.plan.steps or not self._open_targets():
            return 0
        alive, in_progress = self.state.alive_groups(), self.state.groups_in_progress()
        wanted = self.plan.steps * self.plan.groups_per_step - alive
        if self.plan.max_groups:
            wanted = min(wanted, self.plan.max_groups - len(self.state.training_groups()))
        return max(0, min(self.plan.capacity(self.state.step, alive, in_progress), wanted))

    def _open_targets(self) -> list[tuple[str, str]]:
        return [target for target in self.plan.targets if target[0] not in self.state.skipped]

    def _learnable(self) -> bool:
        ready = len(self.state.ready_groups())
        if self.state.step >= self.plan.steps or self._evaluation_due():
            return False
        return ready >= self.plan.groups_per_step or (ready > 0 and self._exhausted())

    def _exhausted(self) -> bool:
        """No further group can ever become ready: the limit is reached and every sample has left."""
        limit = bool(self.plan.max_groups) and len(self.state.training_groups()) >= self.plan.max_groups
        return (limit or not self._open_targets()) and not self.state.groups_in_progress()

    def _evaluation_due(self) -> bool:
        """True while the present version is to be measured on the held-out sets and is not; nothing is learned then."""
        every, step = self.plan.eval_every, self.state.step
        if not every or self._stopping:
            return False
        last = step >= self.plan.steps or (self._exhausted() and not self.state.ready_groups())
        if step % every and not last:
            return False
        prompts = held_out_now(self.plan, self.state)
        return any((step, *prompt.key) not in self.state.held_out for prompt in prompts.values())

    async def _hold_out(self) -> None:
        """Forms the held-out groups of the present version once the generators have it; measures when all are whole."""
        if not self._evaluation_due() or self.state.published != (self.state.epoch, self.state.step):
            return
        for name, prompt in held_out_now(self.plan, self.state).items():
            if name not in self.state.groups:
                group = Group(
                    name, prompt.task_id, prompt.device_type, self.plan.held_out_samples, self.state.step,
                    held_out=prompt.name, exemplars=prompt.exemplars,
                )  # fmt: skip
                if await self._open(group):
                    self._to_draw.append(Order(group, tuple(range(group.width))))
        prompts = held_out_now(self.plan, self.state)
        if any(self.state.ledger.open_samples(name) for name in prompts):
            return
        for name in prompts:
            if name not in self.state.ledger.groups.fates:
                await self._emit(GroupLeft(group_id=name, fate="measured", epoch=self.state.epoch))
        for event in figures_now(self.plan, self.state, prompts):
            await self._emit(event)

    async def _start_what_may(self) -> None:
        await self._hold_out()
        for _ in range(3):
            waiting = self._waiting()
            self._turns = self._turns.pass_on(waiting)
            started = False
            for role in ("generate", "evaluate", "learn"):
                while self._waiting()[role] and self._has_room(role) and self._turns.may_start(role, self._waiting()):
                    started = await self._start(role) or started
            if started:
                return

    def _has_room(self, role: Role) -> bool:
        running = self._turns.count(role)
        return running < {"learn": 1, "evaluate": self.plan.concurrent_scores}.get(role, self.plan.concurrent_groups)

    async def _start(self, role: Role) -> bool:
        await self._enter(PHASE_OF_ROLE[role])
        await self._let_sleep(role != "generate")
        if role == "learn":
            self._asleep = None  # a publication wakes them, a call without a step does not
            return self._spawn(role, self._learning.learn(partial=self._exhausted() or self.plan.partial_steps))
        if role == "evaluate":
            drawn, attempt = self._to_score.popleft()
            return self._spawn(role, self._score(drawn, attempt))
        if self._to_draw:
            order = self._to_draw.popleft()
        else:
            formed = await self._form()
            if formed is None:
                return False
            order = Order(formed, tuple(range(formed.width)))
        return self._spawn(role, self._draw(order))

    async def _let_sleep(self, asleep: bool) -> None:
        """Where the roles share a device, the generators hold it only while it is their turn."""
        if not self.plan.take_turns or asleep == self._asleep:
            return
        work = self._handles.generators.sleep() if asleep else self._handles.generators.wake()
        await within(work, self.plan.publish_timeout_s, "the generators to give or take the device", "publish")
        self._asleep = asleep

    def _spawn(self, role: Role, work: Coroutine[Any, Any, None]) -> bool:
        self._turns = self._turns.start(role, self._waiting())
        job = asyncio.create_task(self._as_unit(role, work))
        self._jobs.add(job)
        return True

    async def _as_unit(self, role: Role, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            self._turns = self._turns.finish(role)
            self._wake.set()

    async def _wait(self) -> None:
        wake = asyncio.create_task(self._wake.wait())
        done, _ = await asyncio.wait({wake, *self._jobs}, return_when=asyncio.FIRST_COMPLETED)
        wake.cancel()
        for job in done & self._jobs:
            self._jobs.discard(job)
            job.result()  # a job's own error ends the run

    async def _form(self) -> Group | None:
        """Chooses a task and opens its group; None when the task was skipped or none is left."""
        known = self.state.training_groups()
        formed = Counter((group.task_id, group.device_type) for group in known)
        target = next_target(self._open_targets(), formed, self.plan.seed)
        if target is None:
            return None
        size = self.plan.samples_per_group * self.plan.turns
        name = f"{self.plan.run_id}-g{len(known):05d}"
        group = Group(name, target[0], target[1], size, self.state.step, self.plan.turns)
        return group if await self._open(group) else None

    async def _open(self, group: Group) -> bool:
        """Opens a group in the store and writes it down; False when its task was skipped."""
        try:
            await within(
                self._handles.prompts.open_group(group), self.plan.store_timeout_s, "the store to open a group", "store"
            )
        except PromptRefused as refused:
            await self._skip(group.task_id, refused)
            return False
        await self._emit(
            GroupFormed(
                group_id=group.id, task_id=group.task_id, device_type=group.device_type, size=group.size,
                policy_step=group.policy_step, turns=group.turns, held_out=group.held_out, exemplars=group.exemplars,
            )
        )  # fmt: skip
        return True

    async def _draw(self, order: Order) -> None:
        """Has the missing samples of an order drawn; what does not come is asked for again, then cancelled."""
        group = order.group
        missing = set(self.state.ledger.open_samples(group.id)) & set(order.indices)
        missing -= {drawn.index for drawn, _ in self._to_score if drawn.group_id == group.id}
        publications = len(self.state.publications)
        try:
            async with asyncio.timeout(self.plan.generate_timeout_s):
                async for drawn in self._handles.generators.draw(group, sorted(missing)):
                    if drawn.index in missing and not drawn.aborted:
                        missing.discard(drawn.index)
                        self._to_score.append((drawn, 1))
                        self._wake.set()
        except (WorkerLost, TimeoutError) as error:
            _log.warning("group %s, attempt %d: %s", group.id, order.attempt, error or "the generator took too long")
            if isinstance(error, WorkerLost):
                await self._learning.publish(unless_after=publications)
        if not missing:
            return
        if order.attempt < self.plan.attempts and not self._stopping:
            self._to_draw.append(Order(group, tuple(sorted(missing)), order.attempt + 1))
            return
        await self._cancel(group, sorted(missing), "generator_lost")

    async def _cancel(self, group: Group, indices: list[int], reason: str) -> None:
        await within(
            self._handles.prompts.cancel(group, indices), self.plan.store_timeout_s, "the store to cancel", "store"
        )
        for index in indices:
            await self._leave(
                SampleLeft(sample_id=sample_id(group.id, index), group_id=group.id, outcome="cancelled", reason=reason)
            )
        for index in indices:
            await self._go_on(group, index, "cancelled")

    async def _score(self, drawn: Drawn, attempt: int) -> None:
        group = self.state.groups[drawn.group_id]
        last = attempt >= self.plan.attempts
        event: SampleLeft | None
        try:
            event = await within(
                self._handles.scorers.score(group, drawn, last=last),
                self.plan.evaluate_timeout_s, "an evaluation", "evaluate",
            )  # fmt: skip
        except (WorkerLost, WaitedTooLong) as error:
            _log.warning("sample %s/%d, attempt %d: %s", drawn.group_id, drawn.index, attempt, error)
            event = await self._give_up(group, drawn) if last else None
            if last and event is None:
                return
        if event is None or (event.outcome == "unscored" and not last):
            self._to_score.append((drawn, attempt + 1))
            return
        await self._leave(event)
        await self._go_on(group, drawn.index, event.outcome)
        if self.plan.controls and not self._stopping:
            await self._control(group)

    async def _control(self, group: Group) -> None:
        """The reference against itself, where an evaluator is due for it; nothing waits for its success."""
        work = self._handles.scorers.control(group.task_id, group.device_type)
        try:
            event = await within(work, self.plan.evaluate_timeout_s, "a control", "evaluate")
        except (WorkerLost, WaitedTooLong) as error:
            _log.warning("a control on %s is lost: %s", group.device_type, error)
            return
        if event is not None:
            await self._emit(event)

    async def _give_up(self, group: Group, drawn: Drawn) -> SampleLeft | None:
        """Records a sample that no evaluator could judge; None when even that failed and it was cancelled."""
        try:
            return await within(
                self._handles.scorers.give_up(group, drawn), self.plan.store_timeout_s, "the store to record", "store"
            )
        except WorkerLost:
            await self._cancel(group, [drawn.index], "evaluator_lost")
            return None

    async def _leave(self, event: SampleLeft) -> None:
        if event.sample_id not in self.state.left:
            await self._emit(event)

    async def _close(self) -> None:
        """Finishes what is in flight, confirms the best kernels, checkpoints and closes the run."""
        if self._stopping:
            await self._drain()
        elif self.plan.confirm:
            await self._enter("confirming")
            await self._let_sleep(True)
            await self._confirm_best()
        await self._enter("closing")
        await self._learning.checkpoint(stopping=self._stopping)
        for group in self.state.unfinished_groups():
            await self._cancel(group, self.state.ledger.open_samples(group.id), "run_ended")
        self.state.ledger.check()
        await self._emit(RunClosed(status="stopped" if self._stopping else "finished"))

    async def _drain(self) -> None:
        """Gives what is running the grace time, then cancels it in the ledger."""
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=self.plan.grace_s)
        await self._drop_jobs()

    async def _confirm_best(self) -> None:
        for event in self.state.best().values():
            if event.sample_id in self.state.confirmed or (event.ci_low or 0.0) <= self.plan.confirm_above:
                continue
            confirmed = await within(
                self._handles.scorers.confirm(self.state.groups[event.group_id], event.sample_id),
                self.plan.evaluate_timeout_s, "a confirmation", "evaluate",
            )  # fmt: skip
            await self._emit(confirmed)

    async def _drop_jobs(self) -> None:
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        self._jobs.clear()
