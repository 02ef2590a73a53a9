"""`kontrast evaluate --watch`: evaluates again whenever a file of the evaluation is saved, the reference kept warm.

Invariants: one line an evaluation; nothing that a file may be for a moment (away, half written, no Python) ends the
watch; a save during an evaluation leads to another one after it; Ctrl-C ends it with exit code 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import typer

from deploy.cli.evaluation import (
    Judge,
    MakeJudge,
    Request,
    Result,
    make_judge,
    read_work,
    result_of,
    results_stream,
)
from deploy.cli.panel import brief, sweep_brief
from tasks.errors import UsageError
from tasks.records import Sweep

POLL_S = 0.1
"""Between two looks at the files; a file counts as saved when two looks find the same."""

Signature = tuple[int, int, int]
"""Modification time in ns, size and inode."""


@dataclass(frozen=True)
class Speed:
    """A speedup with its interval; for a sweep the geometric mean, which has none."""

    value: float
    low: float
    high: float


def evaluate_watch(
    request: Request, task_reference: str, candidate_reference: str, *, make: MakeJudge = make_judge
) -> int:
    """Evaluates now and after each save, until Ctrl-C; returns 0.

    Raises UsageError for what cannot be watched, and for a task or shapes that cannot be read at the beginning.
    """
    try:
        paths = watched_files(request, task_reference, candidate_reference)
        read_work(request, task_reference, candidate_reference)
        with results_stream() as stream, make(request.device, request.settings) as judge:
            names = ", ".join(map(str, paths))
            typer.echo(f"watching {names}: save to evaluate again, Ctrl-C to end", err=True)
            _watch(judge, request, (task_reference, candidate_reference), paths, stream)
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    return 0


def watched_files(request: Request, task_reference: str, candidate_reference: str) -> list[Path]:
    """The files that the evaluation is made of. Raises UsageError when there is none, or one is not there."""
    if "-" in (candidate_reference, request.against):
        raise UsageError("--watch cannot watch standard input: give candidates as files")
    if request.seed:
        raise UsageError("--seed reproduces one evaluation: leave it out with --watch")
    if request.protocol == "paper":
        raise UsageError("--protocol paper takes half an hour each time: leave it out with --watch")
    named = [
        reference
        for reference in (task_reference, candidate_reference, request.shapes, request.against)
        if reference and not reference.startswith(("kernelbench:", "procedural:", "seed:"))
    ]
    if not named:
        raise UsageError("there is nothing to watch: with --watch give the task or the candidate as a file")
    for name in named:
        if not Path(name).is_file():
            raise UsageError(f"{name} is not a file: --watch needs files that are there when it begins")
    return [Path(name) for name in dict.fromkeys(named)]


def _watch(judge: Judge, request: Request, references: tuple[str, str], paths: Sequence[Path], stream: IO[str]) -> None:
    """Evaluates for ever."""
    seen: list[Signature] | None = None
    last: Result | None = None
    speed: Speed | None = None
    while True:
        seen = wait_for_save(paths, seen)
        begin = time.monotonic()
        try:
            last, before = result_of(request, read_work(request, *references), judge), last
            text = f"{_brief(last)}{change(last, before, speed)} [{time.monotonic() - begin:.1f} s]"
            speed = speed_of(last) or speed
        except UsageError as error:
            text = f"not evaluated: {error}"
        stream.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
        stream.flush()


def wait_for_save(paths: Sequence[Path], seen: list[Signature] | None) -> list[Signature]:
    """Waits until the files are all there, have content, differ from `seen` and no longer change."""
    before: list[Signature | None] = []
    while True:
        now = [_signature(path) for path in paths]
        there = [one for one in now if one is not None]
        if len(there) == len(now) and now == before and there != seen:
            return there
        before = now
        time.sleep(POLL_S)


def _signature(path: Path) -> Signature | None:
    """None while the file is away or empty, as it is for a moment when it is written anew."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found.st_size else None


def _brief(result: Result) -> str:
    return sweep_brief(result) if isinstance(result, Sweep) else brief(result)


def speed_of(result: Result) -> Speed | None:
    """The speed of an accepted result; None for any other."""
    if result.outcome != "accepted":
        return None
    if isinstance(result, Sweep):
        return None if result.geometric_mean is None else Speed(*3 * (result.geometric_mean,))
    measured = result.measurement
    return None if measured is None else Speed(measured.speedup, measured.ci_low, measured.ci_high)


def change(result: Result, last: Result | None, speed: Speed | None) -> str:
    """What is new against the last result; `speed` is that of the last accepted one."""
    if last is None:
        return ""
    parts = [] if result.outcome == last.outcome else [f"was {last.outcome}"]
    now = speed_of(result)
    if now is not None and speed is not None:
        against = "the last" if last.outcome == "accepted" else "the last accepted"
        same = now.low != now.high and now.low <= speed.high and speed.low <= now.high
        noise = " (within the intervals)" if same else ""
        parts.append(f"{math.expm1(math.log(now.value / speed.value)):+.1%} against {against}{noise}")
    return "".join(f", {part}" for part in parts)
