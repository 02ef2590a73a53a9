"""Publication through a safetensors file: for vLLM's CPU build and the transformers engine, on one machine.

Invariants: the file has its final name only when it is whole; the file of the version before is kept until the new one
has been taken by every engine, and then none but the new one is left, whoever wrote the others: a learner that was
killed leaves a whole copy of the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
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

    def __init__(self, folders: Sequence[Path], *, timeout_s: float, dtype: torch.dtype | None = None) -> None:
        """Uses the first of `folders` with room for two copies, else the last; casts to `dtype` where it is given."""
        super().__init__(timeout_s=timeout_s)
        self._folders = tuple(folders)
        self._dtype = dtype
        self._path: Path | None = None

    async def _prepare(self, weights: NamedTensors, version: PolicyVersion) -> Sent:
        self._path, sent = await asyncio.to_thread(self._write, weights, f"policy-{version}.safetensors")
        return sent

    async def _transfer(self, weights: NamedTensors, receivers: Sequence[Receiver], sent: Sent) -> None:  # noqa: ARG002
        if self._path is None:
            raise PublishError("nothing was written: publish() must run from its beginning")
        source = SafetensorsFiles((self._path,))
        for result in await asyncio.gather(*(r.load_weights(source) for r in receivers), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _finalize(self, version: PolicyVersion) -> None:  # noqa: ARG002
        self._remove(but=self._path)

    def close(self) -> None:
        """Removes the last file and the folder."""
        self._remove()
        for folder in self._folders:
            with contextlib.suppress(OSError):  # something else lies in it, or it was never made
                folder.rmdir()

    def _remove(self, *, but: Path | None = None) -> None:
        for folder in self._folders:
            for path in folder.glob("policy-*.safetensors*"):
                if path != but:
                    path.unlink(missing_ok=True)

    def _write(self, weights: NamedTensors, name: str) -> tuple[Path, Sent]:
        from safetensors.torch import save_file

        sent, tensors = Sent(), {}
        for key, tensor in weights():
            held = tensor.detach().to("cpu", self._dtype or tensor.dtype).contiguous()
            tensors[key] = held
            sent.count(held)
        folder = self._folder_for(sent.bytes)
        partial = folder / f"{name}.partial"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, partial, metadata={"format": "pt"})
            partial.rename(folder / name)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise PublishError(
                f"{sent.bytes / 2**20:.0f} MiB of weights cannot be written to {folder} ({error.strerror}): free some "
                "space there, or set learner.publish.folder to another folder"
            ) from error
        return folder / name, sent

    def _folder_for(self, size: int) -> Path:
        if self._path is not None:
            return self._path.parent
        for folder in self._folders[:-1]:
            if folder.parent.is_dir() and shutil.disk_usage(folder.parent).free > 2 * size:
                return folder
        return self._folders[-1]
