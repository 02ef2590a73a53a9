"""Reads what compilers say: the first errors with their lines, and the text cut to a size a model can learn from.

Invariant: total functions; text that no pattern knows is kept as it is.
"""

from __future__ import annotations

import re

from evaluator.compile.request import TEXT_LIMIT, Diagnostic

MAX_ERRORS = 5

_FILE = r"(?P<file>[^\s:()][^:()]*)"
_LINKER = r"(?:undefined reference to|cannot find|multiple definition)"
_PATTERNS = (
    re.compile(rf"^{_FILE}:(?P<line>\d+)(?::\d+)?: (?:fatal )?error: (?P<message>.*)$"),  # gcc, clang
    re.compile(rf"^{_FILE}\((?P<line>\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (?P<message>.*)$"),  # nvcc
    re.compile(r"^ptxas (?P<file>[^\s,]+), line (?P<line>\d+); (?:error|fatal)\s*: (?P<message>.*)$"),
    re.compile(r"^(?:ptxas|nvcc|nvlink|cicc) (?:error|fatal)\s*: (?P<message>.*)$"),
    re.compile(rf"^(?:\S*/)?ld(?:\.\w+)?: (?:(?P<file>[\w.+-]+):\S*: )?(?P<message>{_LINKER}.*)$"),
    re.compile(rf"^(?P<file>[\w.+-]+):\(\.\S+\): (?P<message>{_LINKER}.*)$"),
    re.compile(r"^(?:gcc|g\+\+|cc|c\+\+|cc1plus|cc1): (?:fatal )?error: (?P<message>.*)$"),
)


def first_errors(text: str) -> tuple[Diagnostic, ...]:
    """The first errors of a compiler's or linker's output, each once, at most `MAX_ERRORS`."""
    found: dict[tuple[str, int, str], Diagnostic] = {}
    for line in text.splitlines():
        for pattern in _PATTERNS:
            match = pattern.match(line)
            if match:
                groups = match.groupdict()
                error = Diagnostic(
                    file=groups.get("file") or "", line=int(groups.get("line") or 0), message=groups["message"][:400]
                )
                found.setdefault((error.file, error.line, error.message), error)
                break
        if len(found) == MAX_ERRORS:
            break
    return tuple(found.values())


def cut(text: str, limit: int = TEXT_LIMIT) -> str:
    """The text from its first error on, at most `limit` characters, whole lines; says how many lines were left out."""
    lines = [line.rstrip() for line in text.splitlines()]
    begin = next((i for i, line in enumerate(lines) if any(p.match(line) for p in _PATTERNS)), 0)
    kept: list[str] = []
    size = 0
    for line in lines[begin:]:
        line = line if len(line) <= 500 else line[:497] + "..."
        if size + len(line) + 1 > limit - 40:
            kept.append(f"[{len(lines) - begin - len(kept)} more lines]")
            break
        kept.append(line)
        size += len(line) + 1
    return "\n".join(kept)
