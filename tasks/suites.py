"""Finds tasks by what a person types: an id of a suite, a file, a folder, or a range.

| reference | task |
|---|---|
| `kernelbench:2/18` | level 2, problem 18 |
| `procedural:row_norm/17` | index 17 of the family |
| anything else | path of a file in KernelBench's convention |

A selector names several: `kernelbench`, `kernelbench:1`, `kernelbench:1/1-16`, `procedural:row_norm/0-15`, a folder, or
a comma-separated list of selectors. Invariant: nothing here runs a task's code; ill-formed input is a `UsageError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tasks.errors import UsageError
from tasks.kernelbench import find_kernelbench, read_kernelbench, task_of_row
from tasks.procedural import generate
from tasks.procedural.family import Size
from tasks.records import Task
from tasks.records.task import Mode, Precision
from tasks.reference_source import read_source, task_from_source

MAX_RANGE = 100_000
"""Most tasks that one range may name."""

_RANGE = r"(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?"
_KERNELBENCH = re.compile(rf"(?:(?P<level>\d{{1,9}})(?:/{_RANGE})?)?")
_PROCEDURAL = re.compile(rf"(?P<family>[a-z0-9_]+)/{_RANGE}")


def load_task(
    ref: str | Path,
    *,
    size: Size = "gpu",
    kernelbench: Path | None = None,
    precision: Precision = "fp32",
    mode: Mode = "as_given",
) -> Task:
    """The one task that `ref` names. `size` counts for procedural tasks only.

    `kernelbench` says where that benchmark lies (see `find_kernelbench`). Raises UsageError for an unknown id, an
    unreadable file, an ill-formed task, or a reference that names several tasks.
    """
    text = str(ref)
    if not text.startswith(("kernelbench:", "procedural:")):
        if text == "kernelbench" or ("," in text and not Path(text).exists()):
            raise UsageError(f"{text} names several tasks; give one, such as kernelbench:2/18")
        return _file_task(Path(text), precision=precision, mode=mode)
    tasks = _suite_tasks(text, size=size, kernelbench=kernelbench, precision=precision, mode=mode)
    if len(tasks) != 1:
        raise UsageError(
            f"{text} names {len(tasks)} tasks; give one, such as kernelbench:2/18 or procedural:row_norm/17"
        )
    return tasks[0]


def list_tasks(
    selector: str | Path,
    *,
    size: Size = "gpu",
    kernelbench: Path | None = None,
    precision: Precision = "fp32",
    mode: Mode = "as_given",
) -> list[Task]:
    """All tasks that a selector names, in the order named, a folder's by file name; each content once.

    Raises UsageError as `load_task` does, and for a folder without tasks.
    """
    text = str(selector)
    parts = [text] if Path(text).exists() else [part.strip() for part in text.split(",")]
    one = partial(_selected, size=size, kernelbench=kernelbench, precision=precision, mode=mode)
    found: dict[str, Task] = {}
    for part in parts:
        for task in one(part):
            found.setdefault(task.content_hash, task)
    return list(found.values())


def _selected(part: str, *, size: Size, kernelbench: Path | None, precision: Precision, mode: Mode) -> list[Task]:
    if part == "kernelbench" or part.startswith(("kernelbench:", "procedural:")):
        return _suite_tasks(part, size=size, kernelbench=kernelbench, precision=precision, mode=mode)
    path = Path(part)
    if not path.is_dir():
        return [_file_task(path, precision=precision, mode=mode)]
    files = sorted(path.glob("*.py"), key=lambda file: _natural(file.name))
    if not files:
        raise UsageError(f"{path} holds no .py files; give a folder of tasks in KernelBench's convention")
    return [_file_task(file, precision=precision, mode=mode) for file in files]


def _suite_tasks(text: str, *, size: Size, kernelbench: Path | None, precision: Precision, mode: Mode) -> list[Task]:
    suite, _, rest = text.partition(":")
    if suite == "kernelbench":
        return _kernelbench_tasks(text, rest, kernelbench, partial(task_of_row, precision=precision, mode=mode))
    match = _PROCEDURAL.fullmatch(rest)
    if match is None:
        raise UsageError(f"{text} is no procedural task; give procedural:FAMILY/INDEX or procedural:FAMILY/FIRST-LAST")
    family = match["family"]
    return [generate(family, i, size, precision=precision, mode=mode) for i in _range(match, text)]


def _kernelbench_tasks(text: str, rest: str, where: Path | None, make: Callable[..., Task]) -> list[Task]:
    match = _KERNELBENCH.fullmatch(rest)
    if match is None:
        raise UsageError(f"{text} is no KernelBench task; give kernelbench:LEVEL/PROBLEM or kernelbench:LEVEL")
    path = find_kernelbench(where)
    rows = {(row.level, row.problem_id): row for row in read_kernelbench(path)}
    if match["level"] is None:
        return [make(row) for row in rows.values()]
    level = int(match["level"])
    of_level = [row for row in rows.values() if row.level == level]
    if not of_level:
        known = ", ".join(str(n) for n in sorted({key[0] for key in rows}))
        raise UsageError(f"unknown task {text}: KernelBench at {path} has the levels {known}")
    if match["first"] is None:
        return [make(row) for row in of_level]
    wanted = [(level, problem) for problem in _range(match, text)]
    for key in wanted:
        if key not in rows:
            span = f"{of_level[0].problem_id} to {of_level[-1].problem_id}"
            raise UsageError(
                f"unknown task kernelbench:{key[0]}/{key[1]}: level {level} at {path} has the problems {span}"
            )
    return [make(rows[key]) for key in wanted]


def _file_task(path: Path, *, precision: Precision, mode: Mode) -> Task:
    try:
        exists = path.exists()
    except (OSError, ValueError):
        exists = False
    if not exists:
        raise UsageError(
            f"unknown task {str(path)[:200]!r}: give a file, kernelbench:LEVEL/PROBLEM or procedural:FAMILY/INDEX"
        )
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give one file of it")
    return task_from_source(read_source(path), where=str(path), file=path.name, precision=precision, mode=mode)


def _range(match: re.Match[str], text: str) -> range:
    first = int(match["first"])
    last = int(match["last"]) if match["last"] else first
    if last < first:
        raise UsageError(f"{text} ends before it begins; give FIRST-LAST with FIRST <= LAST")
    if last - first >= MAX_RANGE:
        raise UsageError(f"{text} names more than {MAX_RANGE} tasks; give a smaller range")
    return range(first, last + 1)


def _natural(name: str) -> tuple[list[int], str]:
    return [int(digits) for digits in re.findall(r"\d+", name)[:1]], name
