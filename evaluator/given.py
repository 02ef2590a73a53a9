"""What a caller of the public functions gives, as records: a task or a candidate, a path to a file of it, or its text.

Invariant: what is neither is refused in one sentence that says what is wanted.
"""

from __future__ import annotations

from pathlib import Path

from tasks.errors import UsageError
from tasks.records import Candidate, Task
from tasks.reference_source import is_source, read_source, task_from_source
from tasks.suites import load_task

TaskLike = Task | str | Path
"""A task; an id or a path as on the command line; or the source text of a task."""
CandidateLike = Candidate | str | Path
"""A candidate, the path of a file with `ModelNew`, or its source text."""


def task_of(given: TaskLike, device: str) -> Task:
    """The task; a procedural id has the size of the device, such as `cpu`. Raises UsageError."""
    if isinstance(given, Task):
        return given
    if isinstance(given, str) and is_source(given):
        return task_from_source(given)
    if isinstance(given, str | Path):
        return load_task(given, size="cpu" if device == "cpu" else "gpu")
    raise UsageError(
        f"the task is {_words(given)}: give a path, an id such as kernelbench:1/19, source text or a tasks.records.Task"
    )


def candidate_of(given: CandidateLike) -> Candidate:
    """The candidate. Raises UsageError."""
    if isinstance(given, Candidate):
        return given
    if isinstance(given, str) and is_source(given):
        return Candidate(source=given, origin="text")
    if isinstance(given, str | Path):
        return Candidate(source=read_source(Path(given)), origin="file", detail=str(given))
    raise UsageError(
        f"the candidate is {_words(given)}: give a path, source text with `class ModelNew` or a tasks.records.Candidate"
    )


def _words(given: object) -> str:
    return "missing" if given is None else f"of type {type(given).__name__}"
