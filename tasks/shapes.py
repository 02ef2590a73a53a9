"""Other shapes of a task: the constants of its module, such as `batch_size = 16`, set to other values in its source.

Invariants: a task's code is parsed here, never executed; only the values' own characters change, so that line numbers
stay; a name that a row sets is one that the module assigns exactly once, from numbers, texts and sequences of them.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.errors import UsageError
from tasks.records import Task

Shape = Mapping[str, Any]
"""Names of constants and their values: numbers, texts, booleans, None, and lists of them."""

_PLAIN = (ast.Constant, ast.Tuple, ast.List, ast.UnaryOp, ast.BinOp, ast.Name, ast.operator, ast.unaryop, ast.Load)
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def shape_words(shape: Shape) -> str:
    """`batch_size=16 dim=1024`; `as written` for a row that changes nothing."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in shape.items()) or "as written"


def constants(source: str) -> dict[str, ast.expr]:
    """The constants that a row may set, with the expressions that they have in the source."""
    body = ast.parse(source).body
    bound = Counter(
        node.id
        for statement in body
        if not isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    pairs = (pair for statement in body for pair in _pairs(statement))
    return {name: value for name, value in pairs if bound[name] == 1 and _is_plain(value)}


def reshaped(task: Task, shape: Shape) -> Task:
    """The task with constants set to the values of a shape; the task itself for an empty one.

    It is named `procedural:row_norm/17[dim=1024]`. Raises UsageError for a name that is no constant of the task, and
    for a value of another kind than the constant's.
    """
    if not shape:
        return task
    known = constants(task.source)
    lines = task.source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    edits = []
    for name, value in shape.items():
        if name not in known:
            raise UsageError(_unknown(name, known))
        node = known[name]
        _check_kind(name, node, value)
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        edits.append((begin, end, repr(_sequence(value, list if isinstance(node, ast.List) else tuple)).encode()))
    data = task.source.encode()
    for begin, end, text in sorted(edits, reverse=True):
        data = data[:begin] + text + data[end:]
    source = data.decode()
    words = ",".join(f"{name}={json.dumps(value)}" for name, value in shape.items())
    return Task(**{**task.model_dump(), "source": source, "id": f"{task.id}[{words}]"})


def _pairs(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Names and expressions of `a = 1`, `a: int = 1` and `a, b = 1, 2`."""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
        yield statement.target.id, statement.value
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from (
            (one.id, own) for one, own in zip(target.elts, value.elts, strict=True) if isinstance(one, ast.Name)
        )


def _is_plain(value: ast.expr) -> bool:
    return all(isinstance(node, _PLAIN) for node in ast.walk(value))


def _unknown(name: str, known: Mapping[str, ast.expr]) -> str:
    if not known:
        return (
            f"the task has no constant {name!r}, nor any other: give its sizes names at the top of its file, such as "
            f"batch_size = 16, and use them in get_inputs"
        )
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"the task has no constant {name!r}: {hint}it has {', '.join(known)}"


def _check_kind(name: str, node: ast.expr, value: Any) -> None:
    """Raises UsageError unless the value is of the kind that the constant has; expressions are numbers."""
    if isinstance(node, ast.Constant) and node.value is None:
        return
    if isinstance(node, ast.Tuple | ast.List):
        fits, wanted = isinstance(value, list), "a list"
    else:
        kind = type(node.value) if isinstance(node, ast.Constant) else float
        allowed = {float: (int, float), int: (int,), bool: (bool,), str: (str,)}.get(kind, ())
        fits = isinstance(value, allowed) and (kind is bool or not isinstance(value, bool))
        wanted = _WORDS.get(kind, "something that a row cannot hold")
    if not fits:
        raise UsageError(f"{name} is {wanted} in the task, not {json.dumps(value)}: give a value of that kind")


def _sequence(value: Any, kind: type[list[Any]] | type[tuple[Any, ...]]) -> Any:
    """A list of a row as what the task has: a list or, as Python writes `(3, 3)`, a tuple."""
    return kind(_sequence(item, tuple) for item in value) if isinstance(value, list) else value
