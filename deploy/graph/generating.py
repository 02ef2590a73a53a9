"""The generator of a run: the rollout's, with what the coordinator relies on.

Invariants: nothing is drawn before weights have arrived, so that a generator started anew never answers with the base
model; the coordinator gets the facts of a sample apart from the sample itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from deploy.graph.handles import WorkerLost
from rollout.actor import Generator
from rollout.config import RolloutConfig
from rollout.engines import GenerationRequest
from tasks.integrity import check_integrity
from tasks.records import PolicyVersion, Prompt


class GeneratorActor(Generator):
    """See the module's text."""

    def __init__(self, config: RolloutConfig, model: str, source: str) -> None:
        check_integrity(source)
        super().__init__(config, model)
        self._starting = asyncio.Lock()
        self._has_weights = False

    async def ready(self) -> dict[str, Any]:
        """Starts the engine once, whoever asks first."""
        async with self._starting:
            return await super().ready()

    async def begin_update(self) -> None:
        """See Engine; starts the engine of a generator that Ray has restarted."""
        await self.ready()
        await super().begin_update()

    async def sleep(self) -> None:
        """See Engine; a generator without an engine holds nothing."""
        if self._engine is not None:
            await super().sleep()

    async def wake(self) -> None:
        """See Engine; without one there is nothing to wake."""
        if self._engine is not None:
            await super().wake()

    async def finish_update(self, version: PolicyVersion) -> None:
        """See Engine; from now on samples may be drawn."""
        await super().finish_update(version)
        self._has_weights = True

    async def draw(self, prompt: Prompt, indices: Sequence[int]) -> AsyncIterator[Any]:
        """Yields for each finished sample first (index, new tokens, aborted), then the sample."""
        if not self._has_weights:
            raise WorkerLost("this generator is new and has no weights yet")
        async for sample in self.generate([GenerationRequest(prompt, tuple(indices))]):
            yield sample.index, len(sample.token_ids), sample.finish_reason == "abort"
            yield sample
