"""Weights from the trainer to the engines: one interface, one adapter per way.

Invariants: nothing outside an adapter knows its engine's API generation; each publication is one pause of every engine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from learner.publish.base import Publication, Publisher, Receiver

if TYPE_CHECKING:
    from learner.config import PublishConfig

__all__ = ["Publication", "Publisher", "Receiver", "create_publisher", "publish_folders"]


def create_publisher(config: PublishConfig, *, run_id: str, bf16: bool) -> Publisher:
    """The configured publisher; `bf16` casts what goes into files, for engines that compute in it."""
    if config.adapter == "ipc_024":
        from learner.publish.ipc_024 import IpcPublisher

        return IpcPublisher(timeout_s=config.timeout_s)
    import torch

    from learner.publish.files import FilesPublisher

    dtype = torch.bfloat16 if bf16 else torch.float32
    return FilesPublisher(publish_folders(config, run_id), timeout_s=config.timeout_s, dtype=dtype)


def publish_folders(config: PublishConfig, run_id: str) -> list[Path]:
    """Where a run's weights may lie on the learner's node while they are published through files."""
    places = [Path(config.folder)] if config.folder else [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return [place / f"kontrast-{run_id}" for place in places]
