"""KernelBench as a suite: its 270 tasks from a checkout, a JSONL file or its parquet files.

Rows have `level`, `problem_id`, `name` and `code`; ids are `kernelbench:<level>/<problem>`. The data is named by the
caller or the environment and never shipped. Source: Ouyang et al., "KernelBench" (arXiv 2502.10517).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tasks.errors import UsageError
from tasks.records import Task
from tasks.records.task import Mode, Precision
from tasks.reference_source import check_task_source, read_source

KERNELBENCH_VARIABLE = "KONTRAST_KERNELBENCH"
SHARED_VARIABLE = "KONTRAST_SHARED"
_HOW_TO_NAME_IT = (
    f"clone the KernelBench repository, or take its JSONL or parquet file, and name it by {KERNELBENCH_VARIABLE}"
)
_TASK_FILE = re.compile(r"(\d+)_(.+)\.py")
_LEVEL_FOLDER = re.compile(r"level_?(\d+)")


class Row(NamedTuple):
    """One problem as KernelBench publishes it."""

    level: int
    problem_id: int
    name: str
    code: str


def find_kernelbench(given: Path | None = None) -> Path:
    """Where KernelBench lies: the argument, `$KONTRAST_KERNELBENCH`, or `$KONTRAST_SHARED/data/kernelbench.jsonl`.

    Raises UsageError, which says how to get and name it, when there is none or when what was named does not exist.
    """
    named = given if given is not None else os.environ.get(KERNELBENCH_VARIABLE) or None
    if named is not None:
        path = Path(named)
        if not path.exists():
            raise UsageError(f"KernelBench is not at {path}: {_HOW_TO_NAME_IT}")
        return path
    shared = os.environ.get(SHARED_VARIABLE)
    if shared and (path := Path(shared) / "data" / "kernelbench.jsonl").is_file():
        return path
    raise UsageError(f"KernelBench is not at hand: {_HOW_TO_NAME_IT}")


def read_kernelbench(path: Path) -> list[Row]:
    """All rows at `path`, ordered by level and problem; UsageError names what is unreadable or ill-formed.

    `path` is a checkout (or its folder with `level1`, ...), a `.jsonl` file, a `.parquet` file, or a folder of either.
    """
    if path.is_dir():
        rows = list(_rows_of_folder(path))
    else:
        rows = list(_rows_of_file(path))
    if not rows:
        raise UsageError(f"{path} holds no KernelBench tasks: {_HOW_TO_NAME_IT}")
    rows.sort(key=lambda row: (row.level, row.problem_id))
    for earlier, later in pairwise(rows):
        if earlier[:2] == later[:2]:
            raise UsageError(
                f"{path} holds problem {later.level}/{later.problem_id} twice; name one copy of KernelBench"
            )
    return rows


def task_of_row(row: Row, *, precision: Precision = "fp32", mode: Mode = "as_given") -> Task:
    """The task of one row; UsageError if its code is not a task."""
    task_id = f"kernelbench:{row.level}/{row.problem_id}"
    check_task_source(row.code, task_id)
    return Task(
        id=task_id, source=row.code, name=row.name, suite="kernelbench", level=row.level, precision=precision, mode=mode
    )


def _rows_of_folder(folder: Path) -> Iterator[Row]:
    for root in (folder / "KernelBench", folder):
        levels = sorted(p for p in root.glob("level*") if p.is_dir() and _LEVEL_FOLDER.fullmatch(p.name))
        if levels:
            for level in levels:
                yield from _rows_of_level(level)
            return
    for pattern in ("*.jsonl", "data/*.jsonl", "*.parquet", "data/*.parquet"):
        for file in sorted(folder.glob(pattern)):
            yield from _rows_of_file(file)


def _rows_of_level(folder: Path) -> Iterator[Row]:
    level = _LEVEL_FOLDER.fullmatch(folder.name)
    for file in sorted(folder.glob("*.py")):
        name = _TASK_FILE.fullmatch(file.name)
        if level and name:
            yield Row(int(level[1]), int(name[1]), file.stem, read_source(file))


def _rows_of_file(path: Path) -> Iterator[Row]:
    if path.suffix == ".jsonl":
        yield from _checked_rows(_jsonl(path), path)
    elif path.suffix == ".parquet":
        yield from _checked_rows(_parquet(path), path)
    else:
        raise UsageError(f"{path} is neither a folder nor a .jsonl or .parquet file: {_HOW_TO_NAME_IT}")


def _jsonl(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError:
                        raise UsageError(f"{path} line {number} is not JSON; name an intact KernelBench file") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is binary, not JSON lines; name an intact KernelBench file") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError(
            f"reading {path} needs pyarrow: install Kontrast's `parquet` extra, or name a checkout or JSONL file"
        ) from None
    try:
        yield from parquet.read_table(path, columns=list(Row._fields)).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"cannot read {path} as KernelBench's parquet file: {str(error).splitlines()[0]}") from None


def _checked_rows(values: Iterable[Any], path: Path) -> Iterator[Row]:
    for value in values:
        if not isinstance(value, dict):
            raise UsageError(f"{path} has a row that is no object; name an intact KernelBench file")
        row = Row(*(value.get(field) for field in Row._fields))  # type: ignore[arg-type]
        integers = all(isinstance(v, int) and not isinstance(v, bool) for v in row[:2])
        if not integers or not isinstance(row.name, str) or not isinstance(row.code, str):
            raise UsageError(
                f"{path} has a row without level, problem_id, name and code; name an intact KernelBench file"
            )
        yield row
