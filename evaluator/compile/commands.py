"""Compilers that a candidate runs itself, in its own sandbox: `subprocess.run(["g++", ...])`, `os.system("nvcc ...")`.

No shell may be executed there, so a plain command line is run without one, and one that needs a shell fails as the
sandbox makes it fail. What a compiler writes on its standard error is kept when nobody else reads it, since the model
that wrote the source learns from it.

Invariants: standard library only, bound at import; a program that is no compiler is run unchanged.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from typing import Any

COMPILERS = frozenset(("cc", "gcc", "g++", "c++", "clang", "clang++", "nvcc", "hipcc"))
_SHELL_SIGNS = re.compile(r"[|&;<>()$`\\\n*?\[\]#~]")
_TEXT_LIMIT = 8000

_runs: list[tuple[subprocess.Popen[Any], str]] = []
"""Compilers run so far, with the file that holds what each said (empty where the candidate reads it)."""


def install() -> None:
    """Replaces `subprocess.Popen` and `os.system`; once per worker."""
    subprocess.Popen = _Popen  # type: ignore[misc]
    os.system = _system


def said_by(error: BaseException) -> str:
    """What the compiler behind a CalledProcessError said; empty for any other error."""
    if isinstance(error, subprocess.CalledProcessError) and _is_compiler(error.cmd):
        return (_decoded(error.stderr) or _decoded(error.output) or failures())[:_TEXT_LIMIT]
    return ""


def succeeded() -> tuple[str, ...]:
    """Names of the compilers that ran with success."""
    return tuple(sorted({os.path.basename(str(_words(run.args)[0])) for run, _ in _runs if run.returncode == 0}))


def failures() -> str:
    """What failed compilers said."""
    return "\n".join(_read(path) for process, path in _runs if process.returncode and path)[:_TEXT_LIMIT]


def plain_words(command: str) -> list[str] | None:
    """The words of a command line that needs no shell, else None."""
    if _SHELL_SIGNS.search(command):
        return None
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    return words if words and "=" not in words[0] else None


def _words(command: Any) -> list[Any]:
    if isinstance(command, str):
        return plain_words(command) or []
    return list(command) if isinstance(command, list | tuple) else []


def _is_compiler(command: Any) -> bool:
    words = _words(command)
    if not words:
        return False
    return re.sub(r"-[\d.]+$", "", os.path.basename(os.fspath(words[0]))) in COMPILERS


class NotExecutable(PermissionError, subprocess.CalledProcessError):
    """A program that the sandbox does not execute.

    Also the error of a program that failed, code 126 as a shell has it: torch.compile tries processor features in an
    interpreter of its own and takes a failed trial for an absent feature.
    """

    def __init__(self, error: PermissionError, command: Any) -> None:
        PermissionError.__init__(self, error.errno, error.strerror, error.filename)
        self.returncode, self.cmd, self.output, self.stderr = 126, command, None, None

    def __str__(self) -> str:
        return PermissionError.__str__(self)


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Runs plain command lines without a shell, and keeps what a compiler says when nobody else reads it."""

    def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
        if options.get("shell") and isinstance(args, str):
            words = plain_words(args)
            if words is not None:
                args, options["shell"] = words, False
        try:
            self._begin(args, rest, options)
        except PermissionError as error:
            raise NotExecutable(error, args) from error

    def _begin(self, args: Any, rest: tuple[Any, ...], options: dict[str, Any]) -> None:
        said = ""
        if not rest and _is_compiler(args):
            if options.get("stderr") is None:
                said = os.path.join(os.environ.get("TMPDIR", "."), f"compiler{len(_runs)}.log")
                with open(said, "wb") as file:
                    super().__init__(args, **{**options, "stderr": file})
            else:
                super().__init__(args, **options)
            _runs.append((self, said))
            return
        super().__init__(args, *rest, **options)


def _system(command: Any) -> int:
    try:
        code = subprocess.call(command, shell=True)
    except OSError:
        return 127 << 8
    return code << 8 if code >= 0 else -code


def _decoded(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_TEXT_LIMIT)
    except OSError:
        return ""
