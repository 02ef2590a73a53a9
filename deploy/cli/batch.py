"""`kontrast evaluate --batch`: lines in, lines out in the same order, over one or several evaluators.

Invariants: the whole input is read and checked before the first evaluation; all candidates of one task go to one
evaluator, in the order of their lines; a result is written as soon as all lines before it have theirs; every line gets
exactly one evaluation, `evaluator_lost` when its evaluator died.
"""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from deploy.cli.panel import brief
from tasks.errors import KontrastError, UsageError
from tasks.records import Candidate, Evaluation, Task
from tasks.reference_source import is_source

if TYPE_CHECKING:
    from deploy.cli.evaluation import MakeJudge, Request

logger = logging.getLogger(__name__)

MAX_ID = 500


@dataclass(frozen=True)
class Line:
    """One line of the input."""

    id: Any
    """As given: text or number."""
    task: Task
    candidate: Candidate


def read_lines(request: Request, path: Path) -> list[Line]:
    """All lines of a batch. Raises UsageError that names the first line which cannot be used."""
    raw = _read(path)
    lines: list[Line] = []
    tasks: dict[str, Task] = {}
    for number, data in enumerate(raw.split(b"\n"), 1):
        if not data.strip():
            continue
        try:
            lines.append(_line(request, path.parent, data, tasks))
        except UsageError as error:
            raise UsageError(f"line {number} of {path}: {error}") from error
    if not lines:
        raise UsageError(f'{path} has no lines: each is {{"id": ..., "task": ..., "candidate": ...}}')
    return lines


def _read(path: Path) -> bytes:
    """All bytes of a file or of a pipe that somebody writes to; a pipe without a writer is empty and blocks nobody."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                raise UsageError(f"{path} is neither a file nor a pipe; give --batch a readable file")
            os.set_blocking(descriptor, True)
            return file.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"cannot read {path}: {reason}; give --batch a readable file") from None


def _line(request: Request, folder: Path, data: bytes, tasks: dict[str, Task]) -> Line:
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON ({error}); write one object a line") from error
    if not isinstance(value, dict):
        raise UsageError("not an object; write one object a line")
    missing = [key for key in ("id", "task", "candidate") if key not in value]
    unknown = sorted(set(value) - {"id", "task", "candidate"})
    if missing or unknown:
        wrong = f"has no {missing[0]!r}" if missing else f"has an unknown key {unknown[0]!r}"
        raise UsageError(f"the object {wrong}; its keys are id, task and candidate")
    if isinstance(value["id"], bool) or not isinstance(value["id"], str | int) or len(str(value["id"])) > MAX_ID:
        raise UsageError("id is neither a short text nor a whole number")
    for key in ("task", "candidate"):
        if not isinstance(value[key], str) or not value[key].strip():
            raise UsageError(f"{key} is not a text; give a path, an id or source text")
    reference = value["task"]
    if reference not in tasks:
        text = reference if is_source(reference) else ""
        tasks[reference] = request.task_from_text(text, "its task") if text else request.task(_found(reference, folder))
    return Line(value["id"], tasks[reference], _candidate(value["candidate"], folder, tasks[reference]))


def _found(reference: str, folder: Path) -> str:
    """A relative path that is not here is looked for beside the batch file."""
    beside = folder / reference
    try:
        return str(beside) if not Path(reference).exists() and beside.exists() else reference
    except OSError:
        return reference


def _candidate(reference: str, folder: Path, task: Task) -> Candidate:
    from deploy.cli.evaluation import read_candidate

    if is_source(reference):
        return Candidate(source=reference, origin="text")
    if reference == "-":
        raise UsageError("a candidate of a batch cannot come from standard input; give a path or source text")
    return read_candidate(_found(reference, folder), task)


def partition(lines: Sequence[Line], evaluators: int) -> list[list[int]]:
    """Numbers of the lines of each evaluator: each new task goes to the one with the fewest lines so far."""
    shares: list[list[int]] = [[] for _ in range(evaluators)]
    owner: dict[str, int] = {}
    for number, line in enumerate(lines):
        key = line.task.content_hash
        if key not in owner:
            owner[key] = min(range(evaluators), key=lambda index: len(shares[index]))
        shares[owner[key]].append(number)
    return shares


def run_lines(request: Request, lines: Sequence[Line], stream: IO[str], *, make: MakeJudge) -> int:
    """Evaluates all lines, writing results in input order; returns the exit code."""
    waiting: dict[int, Evaluation] = {}
    written = unscored = 0
    source = _serially(request, lines, make) if request.evaluators == 1 else _in_processes(request, lines)
    for number, evaluation in source:
        waiting[number] = evaluation
        while written in waiting:
            done = waiting.pop(written)
            unscored += done.outcome == "unscored"
            result = {"id": lines[written].id, "evaluation": done.model_dump(mode="json")}
            stream.write(json.dumps(result, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n")
            stream.flush()
            written += 1
            typer.echo(f"{written}/{len(lines)} {lines[written - 1].id} {brief(done)}", err=True)
    return 3 if unscored else 0


def _serially(request: Request, lines: Sequence[Line], make: MakeJudge) -> Iterator[tuple[int, Evaluation]]:
    with make(request.device, request.settings) as judge:
        for number, line in enumerate(lines):
            yield number, judge.evaluate(line.task, line.candidate, **request.options)


def _in_processes(request: Request, lines: Sequence[Line]) -> Iterator[tuple[int, Evaluation]]:
    """One process an evaluator, so that no judge's clock waits for another's interpreter."""
    with ExitStack() as stack:
        workers = {}
        for device, share in zip(request.devices(), partition(lines, request.evaluators), strict=True):
            if share:
                worker = _Worker(device, request, [(number, lines[number]) for number in share])
                stack.callback(worker.stop)
                workers[worker.results] = worker
        while workers:
            for ready in wait(list(workers)):
                worker = workers[ready]  # type: ignore[index]
                try:
                    message = worker.results.recv()
                except (EOFError, ConnectionResetError):
                    del workers[worker.results]
                    yield from worker.lost(lines)
                    continue
                if isinstance(message, str):
                    raise KontrastError(message) if worker.exit_code == 1 else _told(message, worker.exit_code)
                number, text = message
                worker.left.remove(number)
                yield number, Evaluation.from_json(text)
                if not worker.left:
                    del workers[worker.results]
                    worker.stop()


def _told(message: str, exit_code: int) -> KontrastError:
    error = KontrastError(message)
    error.exit_code = exit_code
    return error


class _Worker:
    """A child process with one evaluator and the lines of its share."""

    def __init__(self, device: str, request: Request, share: list[tuple[int, Line]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.results, theirs = context.Pipe()
        self.left = [number for number, _ in share]
        self.exit_code = 1
        jobs = [(number, line.task.to_json(), line.candidate.to_json()) for number, line in share]
        self._process = context.Process(target=_work, args=(theirs, os.getpid(), device, request, jobs))
        self._process.start()
        theirs.close()

    def lost(self, lines: Sequence[Line]) -> Iterator[tuple[int, Evaluation]]:
        """What is left of a dead worker's share, unscored."""
        logger.error("an evaluator died with %d lines left", len(self.left))
        for number in self.left:
            line = lines[number]
            yield number, Evaluation(
                outcome="unscored", reason="evaluator_lost", step="screen", task_id=line.task.id,
                message="the evaluator of this line died before it was evaluated: evaluate it again",
                task_hash=line.task.content_hash, candidate_hash=line.candidate.content_hash,
            )  # fmt: skip

    def stop(self) -> None:
        """Ends the process. Safe to call twice."""
        self.results.close()
        self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _work(results: Connection, owner: int, device: str, request: Request, jobs: list[tuple[int, str, str]]) -> None:
    from deploy.cli.evaluation import make_judge
    from tasks.lifeline import die_with_parent

    die_with_parent()
    if os.getppid() != owner:
        return
    os.dup2(2, 1)
    try:
        with make_judge(device, request.settings) as judge:
            for number, task, candidate in jobs:
                evaluation = judge.evaluate(Task.from_json(task), Candidate.from_json(candidate), **request.options)
                results.send((number, evaluation.to_json()))
    except KontrastError as error:
        results.send(str(error))
    except BrokenPipeError:
        return
