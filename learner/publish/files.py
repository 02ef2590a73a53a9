"""Publication through a safetensors file: for vLLM's CPU build and the transformers engine, on one machine.

Invariants: the file has its final name only when it is whole; the file of the version before is kept until the new one
has been taken by every engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from learner.errors import PublishError
from learner.publish.base import NamedTensors, Publisher, Receiver, Sent
from rollout.engines.base import SafetensorsFiles
from tasks.records import PolicyVersion

if TYPE_CHECKING:
    import torch


class FilesPublisher(Publisher):
    """Writes all weights to a folder that the engines can read, best one in memory such as /dev/shm."""

    def __init__(self, folder: Path, *, timeout_s: float, dtype: torch.dtype | None = None) -> None:
        """`dtype` is what the weights are cast to; None keeps the trainer's."""
        super().__init__(timeout_s=timeout_s)
        self._folder = folder
        self._dtype = dtype
        self._path: Path | None = None
        self._previous: Path | None = None

    async def _prepare(self, weights: NamedTensors, version: PolicyVersion) -> Sent:
        path = self._folder / f"policy-{version}.safetensors"
        sent = await asyncio.to_thread(self._write, weights, path)
        if self._path != path:
            self._path, self._previous = path, self._path
        return sent

    async def _transfer(self, weights: NamedTensors, receivers: Sequence[Receiver], sent: Sent) -> None:  # noqa: ARG002
        if self._path is None:
            raise PublishError("nothing was written: publish() must run from its beginning")
        source = SafetensorsFiles((self._path,))
        for result in await asyncio.gather(*(r.load_weights(source) for r in receivers), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _finalize(self, version: PolicyVersion) -> None:  # noqa: ARG002
        if self._previous is not None:
            self._previous.unlink(missing_ok=True)
            self._previous = None

    def close(self) -> None:
        """Removes the last file."""
        for path in (self._path, self._previous):
            if path is not None:
                path.unlink(missing_ok=True)

    def _write(self, weights: NamedTensors, path: Path) -> Sent:
        from safetensors.torch import save_file

        sent, tensors = Sent(), {}
        for name, tensor in weights():
            held = tensor.detach().to("cpu", self._dtype or tensor.dtype).contiguous()
            tensors[name] = held
            sent.count(held)
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        try:
            save_file(tensors, partial, metadata={"format": "pt"})
            partial.rename(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise PublishError(
                f"{sent.bytes / 2**20:.0f} MiB of weights cannot be written to {self._folder} ({error.strerror}): free "
                "some space there, or set learner.publish.folder to another folder"
            ) from error
        return sent
