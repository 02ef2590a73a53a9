"""Checkpoints of the learner: weights, optimizer, randomness, and what of the run they contain.

Invariants: a checkpoint is complete or does not exist (written beside its place, marked, then renamed); old ones go
only after a newer one is complete; what a crash left half-written is removed at the next start, never read.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from learner.errors import CheckpointError
from learner.groups import Fate
from tasks.records import PolicyVersion
from tasks.records.base import Record

MARKER = "COMPLETE"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8})\.e(\d+)")


class LearnerState(Record):
    """What a checkpoint says beside the weights."""

    run_id: str
    version: PolicyVersion
    starts: dict[int, int]
    """Step at which each epoch of this lineage began."""
    fates: dict[str, Fate]
    """Every group that this lineage trained on or dropped: the data cursor, exact whatever the order was."""
    reward_count: int = 0
    reward_mean: float = 0.0
    reward_squares: float = 0.0


class Checkpoint(NamedTuple):
    """A complete checkpoint."""

    folder: Path
    state: LearnerState


class CheckpointFolder:
    """All checkpoints of one run. Used by the first rank; other ranks only write shards into `begin`'s folder."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def begin(self, version: PolicyVersion) -> Path:
        """An empty folder for the shards of this version; an unfinished earlier attempt is removed."""
        partial = self.partial(version)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"no checkpoint can be written in {self._folder}: {error.strerror}") from error
        return partial

    def partial(self, version: PolicyVersion) -> Path:
        """The folder that `begin` makes for this version."""
        return self._folder / f"{_name(version)}.partial"

    def complete(self, state: LearnerState) -> Checkpoint:
        """Makes the begun checkpoint of `state.version` the newest one, and removes those beyond the newest `keep`."""
        partial = self.partial(state.version)
        final = self._folder / _name(state.version)
        try:
            (partial / STATE).write_text(state.to_json() + "\n")
            (partial / MARKER).write_text("")
            for path in [*partial.rglob("*"), partial]:
                _sync(path)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            _sync(self._folder)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {final} could not be finished: {error.strerror}") from error
        for old in self._complete()[self._keep :]:
            # The marker goes first, so that a removal that is cut short leaves nothing that looks complete.
            (old / MARKER).unlink(missing_ok=True)
            shutil.rmtree(old, ignore_errors=True)
        return Checkpoint(final, state)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, or None. Raises CheckpointError when its state cannot be read."""
        for partial in self._folder.glob("*.partial"):
            shutil.rmtree(partial, ignore_errors=True)
        return self.peek()

    def peek(self) -> Checkpoint | None:
        """As `latest`, for those who only look: what a learner is writing stays."""
        complete = self._complete()
        if not complete:
            return None
        try:
            state = LearnerState.from_json((complete[0] / STATE).read_text())
        except (OSError, ValidationError) as error:
            raise CheckpointError(
                f"{complete[0] / STATE} cannot be read: remove that folder to resume from the one before"
            ) from error
        return Checkpoint(complete[0], state)

    def _complete(self) -> list[Path]:
        """Complete checkpoints, newest first: the later epoch is the surviving lineage, whatever its step."""
        found = []
        for path in self._folder.glob("step-*"):
            match = _NAME.fullmatch(path.name)
            if match and (path / MARKER).is_file():
                found.append((int(match[2]), int(match[1]), path))
        return [path for _, _, path in sorted(found, reverse=True)]


def _name(version: PolicyVersion) -> str:
    return f"step-{version.step:08d}.e{version.epoch}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
