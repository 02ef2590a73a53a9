"""Publication: how new weights get from the trainer to every engine, whatever the engine's API is.

Invariants: engines draw nothing between pause and resume; all of them resume with the same version or the publication
fails; a publication may be repeated after any failure. What can be done before the pause is done before it, since the
pause is what costs.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from learner.errors import PublishError
from tasks.records import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor

Phase = Literal["prepare", "pause", "transfer", "finalize", "resume"]
NamedTensors = Callable[[], Iterator[tuple[str, "Tensor"]]]
"""Gives every weight of the policy under its Hugging Face name, merged, anew at each call."""

PROBABLE_CAUSE: dict[Phase, str] = {
    "prepare": "the folder of learner.publish.folder is slow or full",
    "pause": "an engine does not finish its running step: it hangs, or its device is busy with something else",
    "transfer": "an engine does not take the weights: it died, it is on another device than the learner, or the two "
    "sides wait in different collective operations",
    "finalize": "an engine does not answer after it took the weights; its log says what its loader does",
    "resume": "an engine does not go on after new weights: it waits for a step that never comes",
}


class Receiver(Protocol):
    """An engine, here or in another process; see `rollout.engines.base.Engine`."""

    async def begin_update(self) -> None:
        """Stops before the next step; samples in flight stay."""

    async def load_weights(self, source: Any) -> None:
        """Takes weights, or a chunk of them."""

    async def finish_update(self, version: PolicyVersion) -> None:
        """Goes on under the new version."""


@dataclass(frozen=True)
class Publication:
    """A version that every engine has; bytes of one copy of the weights."""

    version: PolicyVersion
    seconds_by_phase: dict[str, float]
    tensors: int
    bytes: int
    engines: int


@dataclass
class Sent:
    """What a transfer moved."""

    tensors: int = 0
    bytes: int = 0
    digests: dict[str, str] = field(default_factory=dict)

    def count(self, tensor: Tensor) -> None:
        """Adds one tensor."""
        self.tensors += 1
        self.bytes += tensor.numel() * tensor.element_size()


class Publisher(ABC):
    """One way for weights to travel; a subclass per API generation."""

    def __init__(self, *, timeout_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._timeout_s = timeout_s
        self._clock = clock

    async def publish(
        self, weights: NamedTensors, receivers: Sequence[Receiver], version: PolicyVersion
    ) -> Publication:
        """Brings the weights to every receiver. Raises PublishError, which names the phase and its probable cause."""
        seconds: dict[str, float] = {}
        sent = await self._phase("prepare", seconds, self._prepare(weights, version))
        await self._phase("pause", seconds, _all(r.begin_update() for r in receivers))
        await self._phase("transfer", seconds, self._transfer(weights, receivers, sent))
        await self._phase("finalize", seconds, self._finalize(version))
        await self._phase("resume", seconds, _all(r.finish_update(version) for r in receivers))
        return Publication(version, seconds, sent.tensors, sent.bytes, len(receivers))

    async def _prepare(self, weights: NamedTensors, version: PolicyVersion) -> Sent:  # noqa: ARG002
        """Work before the pause; what was prepared goes on to `_transfer`."""
        return Sent()

    @abstractmethod
    async def _transfer(self, weights: NamedTensors, receivers: Sequence[Receiver], sent: Sent) -> None:
        """Moves the weights while the engines are paused."""

    async def _finalize(self, version: PolicyVersion) -> None:  # noqa: ARG002
        """Work between the transfer and the moment the engines go on; nothing where an adapter needs none."""
        return None

    async def _phase(self, phase: Phase, seconds: dict[str, float], work: Awaitable[Any]) -> Any:
        began = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError as error:
            raise PublishError(
                f"publication waited {self._timeout_s:g} s in phase {phase}. Probably {PROBABLE_CAUSE[phase]}. "
                "Raise learner.publish.timeout_s if it is only slow."
            ) from error
        finally:
            seconds[phase] = self._clock() - began


async def _all(calls: Iterator[Awaitable[None]] | Any) -> None:
    """Runs all, waits for all, then raises the first failure: no engine is left in the middle of a call."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
