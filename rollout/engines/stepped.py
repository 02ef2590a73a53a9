"""An async engine around anything that decodes in steps.

One thread owns the stepper: it admits jobs, steps, and runs commands (updates, sleep) between two steps, so that the
version of each token is known exactly and no lock guards the model. The asyncio side only exchanges messages with it.

Invariants: a job is in exactly one of `_pending` and `_active` until its one final message; jobs enter the stepper only
while it is not held, so none is computed partly under a prefix of other weights; whatever ends the thread ends every
waiting `generate` with EngineDied.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rollout import metrics
from rollout.engines.base import Completion, Engine, EngineDied, GenerationRequest, WeightSource
from tasks.records.base import digest
from tasks.records.group import FinishReason, PolicyVersion

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class StepRequest:
    """One sample as the stepper sees it. Prompts with equal `cache_salt` may share computed prefixes."""

    id: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    cache_salt: str


@dataclass(frozen=True)
class StepOutput:
    """New tokens of one sample; `finish_reason` is set with its last ones."""

    id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None = None


class Stepper(Protocol):
    """Decodes a set of samples step by step. Used from one thread only; any exception means that it is broken."""

    name: str
    max_rows: int
    """Most samples inside at once."""

    def admit(self, request: StepRequest) -> None:
        """Takes a sample in; it is computed from the next step on."""

    def step(self) -> list[StepOutput]:
        """Computes the next token of some or all samples inside."""

    def abort(self, ids: Sequence[str]) -> None:
        """Forgets samples; ids that are not inside are ignored."""

    def begin_update(self) -> None:
        """Prepares for new weights."""

    def load_weights(self, source: WeightSource) -> None:
        """Loads weights; WeightsError leaves the stepper usable for another load."""

    def finish_update(self) -> None:
        """Puts the loaded weights to use and forgets cached prefixes."""

    def sleep(self) -> None:
        """Frees what it can; there are no samples inside."""

    def wake(self) -> None:
        """Undoes `sleep`."""

    def close(self) -> None:
        """Frees everything."""


@dataclass
class _Job:
    request: GenerationRequest
    index: int
    deliver: Callable[[Completion | EngineDied], None]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)


class SteppedEngine(Engine):
    """See the module.

    `make_stepper` runs in the engine's thread, since thread counts and devices are set per thread; what it raises, the
    constructor raises. `decode` turns token ids into text; `stall_timeout_s` bounds one step or command.
    """

    def __init__(
        self,
        make_stepper: Callable[[], Stepper],
        decode: Callable[[Sequence[int]], str],
        *,
        version: PolicyVersion,
        seed: int,
        stall_timeout_s: float,
    ) -> None:
        self._decode = decode
        self._version = version
        self._seed = seed
        self._stall_timeout_s = stall_timeout_s
        self._ids = itertools.count()
        self._pending: deque[tuple[str, _Job]] = deque()
        self._active: dict[str, _Job] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._held = self._asleep = self._closed = False
        self._died: EngineDied | None = None
        self._busy_since: float | None = None
        started: Future[Stepper] = Future()
        self._thread = threading.Thread(target=self._main, args=(make_stepper, started), name="engine", daemon=True)
        self._thread.start()
        self.name = started.result().name

    @property
    def policy_version(self) -> PolicyVersion:
        return self._version

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Completion | EngineDied] = asyncio.Queue()

        def deliver(message: Completion | EngineDied) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.put_nowait, message)

        jobs = {
            f"{request.prompt.id}/{index}#{next(self._ids)}": _Job(request, index, deliver)
            for request in requests
            for index in request.indices
        }
        left = len(jobs)
        try:
            await self._command(lambda: self._pending.extend(jobs.items()))
            while left:
                message = await self._next(arrived)
                if isinstance(message, EngineDied):
                    raise message
                left -= 1
                yield message
        finally:
            if left:
                with contextlib.suppress(EngineDied):
                    self._post(lambda: self._forget(set(jobs)))

    async def begin_update(self) -> None:
        def hold() -> None:
            self._held = True
            self._rouse()
            self._stepper.begin_update()

        await self._command(hold)

    async def load_weights(self, source: WeightSource) -> None:
        def load() -> None:
            self._must_be_held()
            self._stepper.load_weights(source)

        await self._command(load)

    async def finish_update(self, version: PolicyVersion) -> None:
        def finish() -> None:
            self._must_be_held()
            self._stepper.finish_update()
            self._version = version
            self._held = False

        await self._command(finish)

    async def sleep(self) -> None:
        while not await self._command(self._try_to_sleep):
            await asyncio.sleep(0.05)

    async def wake(self) -> None:
        await self._command(self._rouse)

    async def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, self._stall_timeout_s)

    def _must_be_held(self) -> None:
        if not self._held:
            raise RuntimeError("weights were given outside begin_update and finish_update")

    def _rouse(self) -> None:
        if self._asleep:
            self._stepper.wake()
            self._asleep = False

    def _try_to_sleep(self) -> bool:
        if self._asleep:
            return True
        if self._pending or self._active:
            return False
        self._stepper.sleep()
        self._asleep = True
        return True

    async def _next(self, arrived: asyncio.Queue[Completion | EngineDied]) -> Completion | EngineDied:
        while True:
            try:
                return await asyncio.wait_for(arrived.get(), min(self._stall_timeout_s, 10.0))
            except TimeoutError:
                self._raise_if_dead()

    async def _command(self, run: Callable[[], T]) -> T:
        """Runs `run` on the engine's thread between two steps, and waits for it."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(run())
            except Exception as error:  # noqa: BLE001  it belongs to the caller, who waits for it
                future.set_exception(error)

        self._post(work)
        waiting = asyncio.wrap_future(future)
        while True:
            done, _ = await asyncio.wait([waiting], timeout=min(self._stall_timeout_s, 10.0))
            if done:
                return waiting.result()
            self._raise_if_dead()

    def _post(self, work: Callable[[], None]) -> None:
        with self._changed:
            if self._died or self._closed:
                raise self._died or EngineDied(f"the {self.name} engine is closed.")
            self._commands.append(work)
            self._changed.notify()

    def _raise_if_dead(self) -> None:
        if self._died or self._closed:
            raise self._died or EngineDied(f"the {self.name} engine was closed while it was waited for.")
        since = self._busy_since
        if since is not None and time.monotonic() - since > self._stall_timeout_s:
            raise EngineDied(
                f"the {self.name} engine has not finished a step or command for {self._stall_timeout_s:.0f} s "
                "(rollout.stall_timeout_s): taken for dead."
            )

    def _main(self, make_stepper: Callable[[], Stepper], started: Future[Stepper]) -> None:
        try:
            self._stepper = make_stepper()
        except Exception as error:  # noqa: BLE001  it belongs to the constructor's caller, who waits for it
            started.set_exception(error)
            return
        started.set_result(self._stepper)
        self._run()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._busy_since = time.monotonic()
                self._turn()
                self._busy_since = None
        except Exception as error:  # the thread's last act: everyone who waits hears of it
            log.exception("the %s engine died", self.name)
            metrics.ENGINE_DEATHS.labels(self.name).inc()
            self._end(EngineDied(f"the {self.name} engine died: {type(error).__name__}: {error}"))
        else:
            self._end(EngineDied(f"the {self.name} engine was closed."))
            self._stepper.close()

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._commands or self._may_step())
            return not self._closed

    def _may_step(self) -> bool:
        return not self._held and not self._asleep and bool(self._pending or self._active)

    def _turn(self) -> None:
        while self._commands:
            self._commands.popleft()()
        if not self._may_step():
            return
        while self._pending and len(self._active) < self._stepper.max_rows:
            id_, job = self._pending.popleft()
            self._active[id_] = job
            self._stepper.admit(self._step_request(id_, job))
        for output in self._stepper.step():
            self._record(output)

    def _step_request(self, id_: str, job: _Job) -> StepRequest:
        prompt = job.request.prompt
        seed = int(digest("sample", str(self._seed), prompt.id, str(job.index))[:15], 16)
        return StepRequest(id_, prompt.token_ids, seed, str(self._version))

    def _record(self, output: StepOutput) -> None:
        job = self._active.get(output.id)
        if job is None:
            return
        job.token_ids.extend(output.token_ids)
        job.logprobs.extend(output.logprobs)
        job.versions.extend([self._version] * len(output.token_ids))
        metrics.TOKENS.labels(self.name).inc(len(output.token_ids))
        if output.finish_reason is not None:
            del self._active[output.id]
            metrics.COMPLETIONS.labels(self.name, output.finish_reason).inc()
            job.deliver(self._completion(job, output.finish_reason))

    def _completion(self, job: _Job, finish_reason: FinishReason) -> Completion:
        versions = tuple(job.versions) or (self._version,)
        return Completion(
            prompt_id=job.request.prompt.id,
            index=job.index,
            text=self._decode(job.token_ids),
            token_ids=tuple(job.token_ids),
            logprobs=tuple(job.logprobs),
            policy_versions=versions[:1] if all(one == versions[0] for one in versions) else versions,
            finish_reason=finish_reason,
        )

    def _forget(self, ids: set[str]) -> None:
        self._pending = deque(item for item in self._pending if item[0] not in ids)
        inside = [id_ for id_ in ids if self._active.pop(id_, None)]
        self._stepper.abort(inside)

    def _end(self, reason: EngineDied) -> None:
        with self._changed:
            self._died = reason
            jobs: list[Any] = [*self._active.values(), *(job for _, job in self._pending)]
            commands, self._commands = self._commands, deque()
            self._active.clear()
            self._pending.clear()
        for job in jobs:
            job.deliver(reason)
        del commands  # their callers find `_died` at their next look
