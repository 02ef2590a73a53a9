"""The file of `kontrast evaluate --shapes`: a JSON object a line, each a shape.

Invariant: the whole file is read and checked before the first evaluation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasks.errors import UsageError
from tasks.records import Task
from tasks.shapes import reshaped


def read_shapes(path: Path, task: Task) -> list[tuple[dict[str, Any], Task]]:
    """All shapes of a file, each with the task of that shape.

    Raises UsageError that names the first line which cannot be used.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; give --shapes a readable file") from error
    found: list[tuple[dict[str, Any], Task]] = []
    numbers: dict[str, int] = {}
    for number, data in enumerate(raw.split(b"\n"), 1):
        if not data.strip():
            continue
        try:
            shape = _shape(data)
            found.append((shape, reshaped(task, shape)))
        except UsageError as error:
            raise UsageError(f"line {number} of {path}: {error}") from error
        key = json.dumps(shape, sort_keys=True)
        if key in numbers:
            raise UsageError(f"line {number} of {path} repeats the shape of line {numbers[key]}: leave one out")
        numbers[key] = number
    if not found:
        raise UsageError(f'{path} has no shapes: write one a line, such as {{"batch_size": 16, "dim": 1024}}')
    return found


def _shape(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=_refuse)
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON ({error}); write one object a line") from error
    if not isinstance(value, dict):
        raise UsageError('not an object; write one a line, such as {"batch_size": 16, "dim": 1024}')
    if any(_holds_object(item) for item in value.values()):
        raise UsageError("an object within the object; a constant is a number, a text, true, false or a list")
    return value


def _holds_object(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_object, value)))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, _ in pairs:
        if sum(name == other for other, _ in pairs) > 1:
            raise UsageError(f"{name} is set twice; leave one out")
    return dict(pairs)


def _refuse(word: str) -> Any:
    raise UsageError(f"{word} is no number of JSON; give a finite number")
