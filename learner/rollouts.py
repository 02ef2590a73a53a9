"""Scored groups in a file: written beside a run as the learner takes them, or trained on without any generator.

Invariants: a group is in the file before the learner has it, once, whatever is killed; a file gives its groups in their
order, one at a time, so that each meets the policy step that it would have met in the run that wrote it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from learner.loop import GroupStream
from tasks.errors import UsageError
from tasks.records import ScoredGroup

Entries = list[tuple[str, ScoredGroup]]


class DumpingStream:
    """A stream that writes down every group it hands out."""

    def __init__(self, stream: GroupStream, path: Path) -> None:
        self.run_id = stream.run_id
        self._stream = stream
        self._path = path
        self._known = {group.id for group in read_groups(path, torn=True)} if path.is_file() else set()

    def fence(self, role: str) -> int:
        """See GroupStream."""
        return self._stream.fence(role)

    def claim_all(self, token: int) -> Entries:
        """See GroupStream."""
        return self._dumped(self._stream.claim_all(token))

    def relay(self) -> int:
        """See GroupStream."""
        return self._stream.relay()

    def read_scored(self, consumer: str, count: int, block_ms: int) -> Entries:
        """See GroupStream."""
        return self._dumped(self._stream.read_scored(consumer, count, block_ms))

    def ack(self, entry_ids: Sequence[str]) -> int:
        """See GroupStream."""
        return self._stream.ack(entry_ids)

    def _dumped(self, entries: Entries) -> Entries:
        fresh = [group for _, group in entries if group.id not in self._known]
        if fresh:
            with self._path.open("a") as file:
                file.write("".join(group.to_json() + "\n" for group in fresh))
                file.flush()
                os.fsync(file.fileno())
            self._known.update(group.id for group in fresh)
        return entries


class RolloutFile:
    """The groups of a file as a stream; nothing is ever waited for."""

    def __init__(self, path: Path, run_id: str, starts: Path) -> None:
        """`starts` is a file of the run that counts how often it was started, for the policy's epochs."""
        self.run_id = run_id
        self._starts = starts
        self._groups = read_groups(path)
        self._number = 0
        self._paused = False

    def fence(self, role: str) -> int:  # noqa: ARG002
        """The number of this start, from 1 on."""
        number = 1 + (int(self._starts.read_text()) if self._starts.is_file() else 0)
        partial = self._starts.with_suffix(".partial")
        partial.write_text(str(number))
        partial.replace(self._starts)
        return number

    def claim_all(self, token: int) -> Entries:  # noqa: ARG002
        """Nothing is pending: all groups are read again, and those of the checkpoint are known by their ids."""
        return []

    def relay(self) -> int:
        """There is nothing to move."""
        return 0

    def read_scored(self, consumer: str, count: int, block_ms: int) -> Entries:  # noqa: ARG002
        """The next group, and at the call after it nothing: one group for each turn of the learner."""
        self._paused = not self._paused
        group = next(self._groups, None) if self._paused else None
        if group is None:
            return []
        self._number += 1
        return [(f"{self._number}-0", group)]

    def ack(self, entry_ids: Sequence[str]) -> int:
        """The file stays as it is."""
        return len(entry_ids)


def read_groups(path: Path, *, torn: bool = False) -> Iterator[ScoredGroup]:
    """The groups of a file, each once; with `torn` a line that a kill cut off is cut from the file.

    Raises UsageError naming the first line that is no group.
    """
    seen: set[str] = set()
    try:
        file = path.open("r+b" if torn else "rb")
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): name a file of rollouts") from error
    with file:
        whole = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                group = ScoredGroup.from_json(line)
            except ValidationError as error:
                raise UsageError(f"line {number} of {path} is no scored group: take it out") from error
            if group.id not in seen:
                seen.add(group.id)
                yield group
        if torn:
            file.truncate(whole)


@dataclass(frozen=True)
class OpenDumping:
    """Opens another stream in the learner's process, and writes its groups down."""

    connect: Callable[[], GroupStream]
    path: str

    def __call__(self) -> DumpingStream:
        """The stream."""
        return DumpingStream(self.connect(), Path(self.path))


@dataclass(frozen=True)
class OpenRollouts:
    """Opens a file of groups in the learner's process."""

    path: str
    run_id: str
    starts: str

    def __call__(self) -> RolloutFile:
        """The groups as a stream."""
        return RolloutFile(Path(self.path), self.run_id, Path(self.starts))
