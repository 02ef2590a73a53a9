"""Reads the source text of a task and makes it a record, without ever running it.

Invariants: a task's code is parsed here, never executed; whatever is ill-formed is a `UsageError` of one sentence; a
file's task is named as the file is, one from text by its content.
"""

from __future__ import annotations

import ast
import os
import stat
import warnings
from pathlib import Path

from tasks.errors import UsageError
from tasks.records import Task
from tasks.records.task import Mode, Precision

MAX_SOURCE_BYTES = 1 << 20
"""Largest accepted task; KernelBench's largest has about 10 kB."""

REQUIRED_NAMES = ("Model", "get_inputs", "get_init_inputs")
_HINTS = {
    "Model": "define `class Model(torch.nn.Module)` with a `forward`",
    "get_inputs": "define `get_inputs()` returning the list of arguments of `forward`",
    "get_init_inputs": "define `get_init_inputs()` returning the list of arguments of `Model`, `[]` for none",
}


def read_source(path: Path) -> str:
    """Text of one regular file of at most `MAX_SOURCE_BYTES`; UsageError otherwise, without blocking on a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"cannot read {path}: {reason}; give a readable file") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{path} is not a regular file; give a Python file")
    with os.fdopen(descriptor, "rb") as file:
        try:
            data = file.read(MAX_SOURCE_BYTES + 1)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}; give a readable file") from None
    if len(data) > MAX_SOURCE_BYTES:
        raise UsageError(f"{path} is larger than {MAX_SOURCE_BYTES} bytes, too large for a task or kernel source")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{path} is binary, not UTF-8 text; give a Python file")
    return text


def is_source(text: str) -> bool:
    """Whether a text is source rather than a path or an id: a source has more than one line, or is a statement."""
    return "\n" in text or any(mark in text for mark in ("class ", "import ", "def ", " = "))


def check_task_source(source: str, where: str) -> None:
    """Raises UsageError unless the source parses and defines what KernelBench's convention asks for.

    `where` names the source in the message. A `from x import *` may define anything, so it passes.
    """
    if not source.strip():
        raise UsageError(f"{where} is empty; a task defines Model, get_inputs and get_init_inputs")
    if len(source.encode("utf-8", "replace")) > MAX_SOURCE_BYTES:
        raise UsageError(f"{where} is larger than {MAX_SOURCE_BYTES} bytes, too large for a task")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except SyntaxError as error:
        raise UsageError(
            f"{where} does not parse: line {error.lineno}: {error.msg}; correct the Python source"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{where} does not parse ({type(error).__name__}); correct the Python source") from None
    bound = _module_names(tree.body)
    if "*" in bound:
        return
    for name in REQUIRED_NAMES:
        if name not in bound:
            raise UsageError(f"{where} is not a task: it has no {name}; {_HINTS[name]}")


def task_from_source(
    source: str, *, where: str = "the task", file: str = "", precision: Precision = "fp32", mode: Mode = "as_given"
) -> Task:
    """A task from its text; UsageError if ill-formed.

    Its id is the name of its `file`, such as `softmax.py`; without one `text:<12 hex digits of the content hash>`.
    """
    check_task_source(source, where)
    task = Task(id=file or "text:", source=source, name=Path(file).stem, precision=precision, mode=mode)
    return task if file else task.model_copy(update={"id": f"text:{task.content_hash[:12]}"})


def _module_names(body: list[ast.stmt]) -> set[str]:
    """Names that a module's statements may bind, also inside `if`, `try`, `with` and loops; "*" for a star import."""
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in statement.names)
        else:
            names.update(
                node.id
                for node in ast.iter_child_nodes(statement)
                for node in ast.walk(node)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            )
            for field in ("body", "orelse", "finalbody"):
                names |= _module_names(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                names |= _module_names(handler.body)
    return names
