"""Publication by CUDA IPC to vLLM 0.21 to 0.24 engines on the learner's own device.

The transfer's API is known to `rollout.engines.weights_024` alone; this adapter brings trainer and engines together.
Invariant: the tensors of a chunk live until every engine has taken it, since the engines read the learner's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from learner.publish.base import NamedTensors, Publisher, Receiver, Sent

if TYPE_CHECKING:
    from torch import Tensor

Send = Callable[[Iterator[tuple[str, "Tensor"]], Callable[[Any], None]], None]


class IpcPublisher(Publisher):
    """Hands the weights' device memory to the engines chunk by chunk."""

    def __init__(self, *, timeout_s: float, send: Send | None = None) -> None:
        super().__init__(timeout_s=timeout_s)
        self._send = send

    async def _transfer(self, weights: NamedTensors, receivers: Sequence[Receiver], sent: Sent) -> None:
        loop = asyncio.get_running_loop()

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights():
                sent.count(tensor)
                yield name, tensor.detach()

        async def to_all(chunk: Any) -> None:
            await asyncio.gather(*(receiver.load_weights(chunk) for receiver in receivers))

        def deliver(chunk: Any) -> None:
            asyncio.run_coroutine_threadsafe(to_all(chunk), loop).result(self._timeout_s)

        await asyncio.to_thread(self._sender(), counted(), deliver)

    def _sender(self) -> Send:
        if self._send is not None:
            return self._send
        from rollout.engines.weights_024 import send_by_ipc

        return send_by_ipc
