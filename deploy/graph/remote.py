"""The coordinator's handles over Ray: each call goes to an actor, each dead actor becomes WorkerLost.

Invariants: prompts and completions pass through as object references, never as values; calls that are idempotent and
have no second way are repeated while their actor restarts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deploy.graph.events import (
    ControlMeasured,
    Event,
    KernelConfirmed,
    SampleLeft,
    SeedEvaluated,
    VersionPublished,
    event_from_dict,
    event_to_dict,
)
from deploy.graph.handles import Drawn, Handles, WorkerLost
from deploy.graph.state import Group
from exemplar_store import RunStream
from learner.errors import PublishError
from learner.loop import Learned, Standing

PATIENCE = 30
"""How often a call to a restarting actor is repeated."""
PAUSE_S = 1.0


async def ask(call: Any, *arguments: Any, what: str, **named: Any) -> Any:
    """The answer of one actor call; raises WorkerLost when the actor or its node died meanwhile."""
    from ray import exceptions

    try:
        return await call.remote(*arguments, **named)
    except (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.OwnerDiedError) as error:
        raise WorkerLost(f"{what} died ({type(error).__name__})") from error


async def ask_again(call: Any, *arguments: Any, what: str, **named: Any) -> Any:
    """`ask`, repeated while the actor restarts; for idempotent calls only."""
    for _ in range(PATIENCE):
        try:
            return await ask(call, *arguments, what=what, **named)
        except WorkerLost:
            await asyncio.sleep(PAUSE_S)
    return await ask(call, *arguments, what=what, **named)


class StreamJournal:
    """The run's stream; taking it fences every earlier coordinator off."""

    def __init__(self, stream: RunStream) -> None:
        self._stream = stream
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._stream.fence("coordinator")

    async def append(self, event: Event) -> None:
        """See `handles.Journal`."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._stream.append, event_to_dict(event))

    async def events(self) -> list[Event]:
        """See `handles.Journal`."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: [event_from_dict(value) for value in self._stream.events()]
        )


class RemotePrompts:
    """Prompts through the recorder actor; keeps references to the prompts of groups in flight."""

    def __init__(self, recorder: Any, prompts: dict[str, Any]) -> None:
        self._recorder = recorder
        self._prompts = prompts

    async def open_group(self, group: Group) -> None:
        """See `handles.Prompts`."""
        await ask_again(self._recorder.open_group, group, what="the recorder")
        self._prompts[group.id] = self._recorder.prompt.remote(group)

    async def recorded(self, group: Group) -> list[SampleLeft]:
        """See `handles.Prompts`."""
        events: list[SampleLeft] = await ask_again(self._recorder.recorded, group, what="the recorder")
        return events

    async def cancel(self, group: Group, indices: Sequence[int]) -> None:
        """See `handles.Prompts`."""
        await ask_again(self._recorder.cancel, group, list(indices), what="the recorder")


class RemoteGenerators:
    """All generator actors as one: a group goes to the one with the fewest samples in flight."""

    def __init__(self, generators: Sequence[Any], recorder: Any, prompts: dict[str, Any]) -> None:
        self._generators = list(generators)
        self._recorder = recorder
        self._prompts = prompts
        self._load = [0] * len(self._generators)

    async def draw(self, group: Group, indices: Sequence[int]) -> AsyncIterator[Drawn]:
        """See `handles.Generators`. The actor's stream alternates between facts and the completion itself."""
        from ray import exceptions

        if group.before(indices[0]) is None:
            prompt = self._prompts.setdefault(group.id, self._recorder.prompt.remote(group))
        else:
            prompt = self._recorder.turn_prompt.remote(group, indices[0])
        number = min(range(len(self._load)), key=self._load.__getitem__)
        self._load[number] += len(indices)
        try:
            method = self._generators[number].draw.options(num_returns="streaming")
            stream = aiter(method.remote(prompt, list(indices)))
            async for reference in stream:
                index, new_tokens, aborted = await reference
                yield Drawn(group.id, index, await anext(stream), new_tokens, aborted)
        except (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.OwnerDiedError) as error:
            self._prompts.pop(group.id, None)
            await asyncio.sleep(PAUSE_S)
            raise WorkerLost(f"generator {number} died ({type(error).__name__})") from error
        finally:
            self._load[number] -= len(indices)

    async def sleep(self) -> None:
        """See `handles.Generators`."""
        await self._all("sleep")

    async def wake(self) -> None:
        """See `handles.Generators`."""
        await self._all("wake")

    async def _all(self, method: str) -> None:
        calls = [ask(getattr(actor, method), what="a generator") for actor in self._generators]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, WorkerLost):
                raise result


class RemoteScorers:
    """Scoring through the recorder actor, which asks the evaluators."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    async def score(self, group: Group, drawn: Drawn, *, last: bool) -> SampleLeft:
        """See `handles.Scorers`."""
        event: SampleLeft = await ask(self._recorder.score, group, drawn.reference, last=last, what="the recorder")
        return event

    async def give_up(self, group: Group, drawn: Drawn) -> SampleLeft:
        """See `handles.Scorers`."""
        event: SampleLeft = await ask(self._recorder.give_up, group, drawn.reference, what="the recorder")
        return event

    async def confirm(self, group: Group, sample_id: str) -> KernelConfirmed:
        """See `handles.Scorers`."""
        event: KernelConfirmed = await ask_again(self._recorder.confirm, group, sample_id, what="the recorder")
        return event

    async def seed(self, task_id: str, device_type: str) -> Sequence[SeedEvaluated]:
        """See `handles.Scorers`."""
        events: list[SeedEvaluated] = await ask_again(self._recorder.seed, task_id, device_type, what="the recorder")
        return events

    async def control(self, task_id: str, device_type: str) -> ControlMeasured | None:
        """See `handles.Scorers`."""
        event: ControlMeasured | None = await ask(self._recorder.control, task_id, device_type, what="the recorder")
        return event


class RemoteLearner:
    """The learner actor."""

    def __init__(self, learner: Any, generators: Sequence[Any]) -> None:
        self._learner = learner
        self._generators = list(generators)

    async def standing(self) -> Standing:
        """See `handles.Learner`."""
        standing: Standing = await ask_again(self._learner.standing, what="the learner")
        return standing

    async def learn(self, *, partial: bool) -> Learned:
        """See `handles.Learner`."""
        learned: Learned = await ask(self._learner.learn, partial=partial, what="the learner")
        return learned

    async def publish(self) -> VersionPublished:
        """See `handles.Learner`."""
        try:
            publication = await ask(self._learner.publish, self._generators, what="the learner")
        except (WorkerLost, PublishError) as error:
            await asyncio.sleep(PAUSE_S)
            raise WorkerLost(str(error)) from error
        version = publication.version
        return VersionPublished(
            epoch=version.epoch, step=version.step, seconds_by_phase=dict(publication.seconds_by_phase)
        )

    async def checkpoint(self) -> None:
        """See `handles.Learner`."""
        await ask_again(self._learner.checkpoint, what="the learner")


def remote_handles(stream: RunStream, recorder: Any, generators: Sequence[Any], learner: Any) -> Handles:
    """All handles of one coordinator."""
    prompts: dict[str, Any] = {}
    return Handles(
        StreamJournal(stream), RemotePrompts(recorder, prompts), RemoteGenerators(generators, recorder, prompts),
        RemoteScorers(recorder), RemoteLearner(learner, generators),
    )  # fmt: skip
