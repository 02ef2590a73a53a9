"""The coordinator's side of the learner: where it stands, its steps, its weights' way to the generators.

Invariants: the run's state follows the learner's surviving lineage, whatever was lost; new weights are published after
every step and after every loss of a learner or generator, before anything else is drawn.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from deploy.graph.events import Event, GroupLeft, LineageStarted, StepLearned
from deploy.graph.handles import Learner, LearnerLost, NothingToDo, NotPublished, WaitedTooLong, WorkerLost
from deploy.graph.plan import RunPlan
from deploy.graph.state import RunState
from deploy.graph.waits import within
from learner.loop import Standing

_log = logging.getLogger(__name__)
DROPPED = ("stale", "below_quorum", "zero_variance")
"""Fates of groups that a step could have used."""


class Learning:
    """One coordinator's dealings with the learner; `emit` appends an event and then changes `state`."""

    def __init__(
        self, plan: RunPlan, learner: Learner, state: RunState, emit: Callable[[Event], Awaitable[None]]
    ) -> None:
        self._plan, self._learner, self._state, self._emit = plan, learner, state, emit
        self._publishing = asyncio.Lock()
        self._losses = 0
        self._dropped: Counter[str] = Counter()

    async def standing(self) -> Standing:
        """Where the learner stands, once it has started."""
        return await within(self._learner.standing(), self._plan.start_timeout_s, "the learner to start", "start")

    async def follow(self, standing: Standing, metrics: dict[str, float] | None = None) -> None:
        """Takes over where the learner stands: fates of groups, lost lineages, steps."""
        groups = self._state.ledger.groups
        if standing.epoch > self._state.epoch:
            lost = tuple(
                name for name in groups.fates
                if name not in standing.fates and not self._state.groups[name].held_out
            )  # fmt: skip
            await self._emit(LineageStarted(epoch=standing.epoch, step=standing.step, reopened=lost))
        for name, fate in standing.fates.items():
            if name in groups.sizes and name not in groups.fates:
                await self._emit(GroupLeft(group_id=name, fate=fate, epoch=standing.epoch))
        if standing.step > self._state.step:
            await self._emit(StepLearned(epoch=standing.epoch, step=standing.step, metrics=metrics or {}))

    async def learn(self, *, partial: bool) -> None:
        """One call of the learner and what follows from it. Raises LearnerLost, NothingToDo, WaitedTooLong."""
        try:
            learned = await within(
                self._learner.learn(partial=partial), self._plan.learn_timeout_s, "the learner's step", "learn"
            )
        except WorkerLost as error:
            self._losses += 1
            if self._losses > self._plan.attempts:
                raise LearnerLost(
                    f"The learner died {self._losses} times in one step ({error}). Memory is the usual cause: "
                    f"lower learner.deepspeed.row_tokens, or free some."
                ) from error
            _log.warning("the learner was lost: %s; it resumes from its latest checkpoint", error)
            await self.follow(await self.standing())
            await self.publish()
            return
        self._losses = 0
        before = self._state.ledger.groups.counts()
        await self.follow(learned.standing, dict(learned.metrics))
        if learned.stepped:
            self._dropped.clear()
            await self.publish()
        else:
            self._count_dropped(before, self._state.ledger.groups.counts())

    def _count_dropped(self, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        """Ends a run that has drawn and dropped for too long: solved or hopeless tasks would go on for ever."""
        dropped = Counter({fate: after[fate] - before[fate] for fate in DROPPED if after[fate] > before[fate]})
        if not dropped:
            raise NothingToDo("The learner took no step from complete groups and dropped none: see the learner's log.")
        self._dropped += dropped
        if self._plan.give_up_after and self._dropped.total() >= self._plan.give_up_after:
            words = ", ".join(f"{count} {fate.replace('_', ' ')}" for fate, count in self._dropped.most_common())
            raise NothingToDo(
                f"The last {self._dropped.total()} groups gave no step ({words}): these tasks are solved or out of the "
                f"policy's reach. Choose other tasks, or raise run.give_up_after, then --resume."
            )

    async def publish(self, *, unless_after: int | None = None) -> None:
        """Brings the current weights to every generator; a generator that is lost meanwhile gets another try.

        `unless_after` is the number of publications that the caller has seen: a later one serves it as well.
        """
        async with self._publishing:
            if unless_after is None or len(self._state.publications) == unless_after:
                await self._publish_now()

    async def _publish_now(self) -> None:
        for attempt in range(1, self._plan.attempts + 1):
            try:
                event = await within(
                    self._learner.publish(), self._plan.publish_timeout_s, "the weights' publication", "publish"
                )
            except WorkerLost as error:
                _log.warning("publication, attempt %d: %s", attempt, error)
                if attempt == self._plan.attempts:
                    raise NotPublished(
                        f"New weights reached not every generator in {attempt} attempts: {error}"
                    ) from error
                continue
            await self._emit(event)
            return

    async def checkpoint(self, *, stopping: bool) -> None:
        """At a stop, a learner that is gone or slow does not hold the end up: its last checkpoint stands."""
        limit = self._plan.grace_s if stopping else self._plan.learn_timeout_s
        try:
            await within(self._learner.checkpoint(), limit, "the checkpoint", "learn")
        except (WorkerLost, WaitedTooLong) as error:
            if not stopping:
                raise
            _log.warning("no checkpoint was written at the stop (%s): a resume begins at the one before", error)
