"""The journal of an augmentation: every answer and every verdict as a line of JSON, the only truth about it.

Invariants: an entry is on disk before `append` returns; a line that a kill tore off is cut at the next opening, since
nothing has followed from it; one process at a time holds a journal.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError

from tasks.errors import KontrastError, UsageError
from tasks.records import Demonstration
from tasks.records.base import Record
from tasks.records.group import FinishReason

Verdict = Literal["accepted", "rejected", "unscored", "unreadable", "duplicate", "slow"]
"""What became of an attempt. `duplicate`: equal to a kernel accepted before; `slow`: accepted, but not kept for its
speed."""


class Answered(Record):
    """A teacher has answered; `index` counts its attempts at the task."""

    kind: Literal["answered"] = "answered"
    teacher: str
    task_id: str
    task_hash: str
    index: int = Field(ge=0)
    text: str
    finish_reason: FinishReason = "stop"
    prompt_tokens: int = 0
    new_tokens: int = 0
    cost: float = 0.0
    seconds: float = 0.0


class Judged(Record):
    """An attempt, or an imported kernel, has its verdict; an accepted one is here with everything that is kept."""

    kind: Literal["judged"] = "judged"
    teacher: str
    task_id: str
    task_hash: str
    index: int = Field(ge=0)
    verdict: Verdict
    reason: str = ""
    message: str = ""
    candidate_hash: str = ""
    speedup: float | None = None
    demonstration: Demonstration | None = None


class Refused(Record):
    """A teacher cannot be asked about a task: its prompt is too long, or the endpoint refuses it."""

    kind: Literal["refused"] = "refused"
    teacher: str
    task_id: str
    task_hash: str
    message: str


class Skipped(Record):
    """A task cannot be evaluated, whatever the candidate."""

    kind: Literal["skipped"] = "skipped"
    task_id: str
    task_hash: str
    reason: str
    message: str = ""


Entry = Answered | Judged | Refused | Skipped
_ADAPTER: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


class JournalError(KontrastError):
    """The journal cannot be read or written."""


class Journal:
    """An open journal; a context manager."""

    def __init__(self, path: Path) -> None:
        """Opens or makes the file. Raises UsageError when another process holds it, JournalError when it is damaged."""
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"{path} cannot be opened ({error.strerror}): choose another folder") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise UsageError(f"another process works on {path.parent}: wait for it, or end it") from error
        self.entries = tuple(self._read())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, entry: Entry) -> None:
        """Stores an entry durably. Raises JournalError when it cannot be; the journal then ends before it."""
        data = entry.to_json().encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(end)
            raise not_written(self._path, error) from error

    def _read(self) -> list[Entry]:
        entries, whole = [], 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    entries.append(_ADAPTER.validate_json(line))
                except ValidationError as error:
                    what = error.errors()[0]["msg"]
                    raise JournalError(
                        f"line {number} of {self._path} is no entry of a journal ({what}): take it out"
                    ) from error
                whole += len(line)
        self._file.truncate(whole)
        return entries


def not_written(path: Path, error: OSError) -> JournalError:
    """What is said of a file that cannot be written."""
    return JournalError(f"{path} cannot be written ({error.strerror}): free some space, then go on with --resume")
