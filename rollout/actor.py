"""The generator: a Ray actor around one engine.

A thin shell: it owns no logic. When its engine dies the process ends, so that Ray and the coordinator see a dead actor
instead of a living one that cannot draw; whoever starts the next one gives it the current weights first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from rollout import metrics
from rollout.config import RolloutConfig
from rollout.engines import EngineDied, GenerationRequest, create_engine
from rollout.engines.base import Engine, WeightSource
from rollout.samples import to_sample
from tasks.records.group import PolicyVersion, Sample

log = logging.getLogger(__name__)

ENGINE_DIED_EXIT_CODE = 70


class Generator:
    """What the actor does, without Ray. `ready` must have returned before the rest is used."""

    def __init__(self, config: RolloutConfig, model: str | None = None, version: PolicyVersion | None = None) -> None:
        self._config = config
        self._model = Path(model) if model else None
        self._version = version
        self._engine: Engine | None = None

    async def ready(self) -> dict[str, Any]:
        """Starts the engine on the first call; says which engine, which policy version, and the process."""
        if self._engine is None:
            self._engine = await asyncio.to_thread(
                create_engine, self._config, model=self._model, version=self._version
            )
        return {"engine": self._engine.name, "policy_version": self._engine.policy_version, "pid": os.getpid()}

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Sample]:
        """Yields each sample as it finishes; the iterator's end means that all have left."""
        prompts = {(request.prompt.id, index): request.prompt for request in requests for index in request.indices}
        try:
            async for completion in self._running.generate(requests):
                yield to_sample(completion, prompts[completion.prompt_id, completion.index])
        except EngineDied as error:
            _leave(error)

    async def policy_version(self) -> PolicyVersion:
        """Version that the next token is drawn under."""
        return self._running.policy_version

    async def begin_update(self) -> None:
        """See Engine."""
        await self._timed("pause", self._running.begin_update())

    async def load_weights(self, source: WeightSource) -> None:
        """See Engine."""
        await self._timed("load", self._running.load_weights(source))

    async def finish_update(self, version: PolicyVersion) -> None:
        """See Engine."""
        await self._timed("resume", self._running.finish_update(version))
        metrics.POLICY_STEP.set(version.step)

    async def sleep(self) -> None:
        """Leaves the device to others once no sample is in flight."""
        await self._running.sleep()

    async def wake(self) -> None:
        """Undoes `sleep`."""
        await self._running.wake()

    async def close(self) -> None:
        """Ends the engine."""
        if self._engine is not None:
            await self._engine.close()

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the generator was used before ready() returned")
        return self._engine

    async def _timed(self, phase: str, work: Any) -> None:
        started = time.monotonic()
        try:
            await work
        except EngineDied as error:
            _leave(error)
        metrics.UPDATE_SECONDS.labels(phase).observe(time.monotonic() - started)


def _leave(error: EngineDied) -> None:
    """Ends the process at once: an engine's threads or device calls may never return."""
    log.error("%s This generator ends; its successor needs the current weights.", error)
    logging.shutdown()
    os._exit(ENGINE_DIED_EXIT_CODE)


def generator_actor() -> Any:
    """The Ray actor class; make one by `generator_actor().options(...).remote(config, model, version)`."""
    import ray

    return ray.remote(Generator)
