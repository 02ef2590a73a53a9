"""Precompiled `torch/extension.h`: for builds that come again and again with the same flags.

Parsing torch's headers is two thirds of a C++ extension's build (20 of 30 s); a precompiled header saves it, costs one
such build and 0.8 GiB of disk, and fits one set of flags. So it is made only after the same flags came several times,
where memory and disk allow, and the build that makes it due waits for it: nothing compiles behind a timing's back. nvcc
takes none.

Invariants: a header's folder holds the finished file or is not there; a build is right with and without it, so its
presence is no part of an artefact's name.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

from evaluator.compile.job import Limits
from evaluator.compile.request import CompileRequest
from evaluator.compile.routes import BuildPlan, header_flags
from evaluator.compile.toolchain import Toolchain
from tasks.records.base import digest, stable_json

_FILE = Path("torch") / "extension.h.gch"
_SIZE_MIB = 1024
"""A little more than the largest that was seen (785 MiB)."""
_NEEDED_MEMORY_MIB = 8192
"""Memory that must be free: the compiler, and its output in the job's own file system."""


class HeaderStore:
    """Folders of precompiled headers by flags, and how often flags came."""

    def __init__(self, root: Path, limit_mib: int, after: int) -> None:
        self._root = root
        self._limit = limit_mib << 20
        self._after = after
        self._seen: Counter[str] = Counter()
        self._making: set[str] = set()
        self._lock = threading.Lock()

    def key(self, request: CompileRequest, tools: Toolchain) -> str:
        """Names the header that fits a request; empty where none can."""
        flags = header_flags(request, tools) if self._limit >= _SIZE_MIB << 20 else None
        return digest("header", tools.fingerprint, stable_json(flags)) if flags is not None else ""

    def find(self, key: str) -> str:
        """The include folder of a finished header, marked as just used; empty when there is none."""
        folder = self._root / key
        try:
            os.utime(folder / _FILE)
        except OSError:
            return ""
        return str(folder)

    def due(self, key: str) -> bool:
        """Counts one more build with these flags; True when the header should be made now, once per process."""
        with self._lock:
            self._seen[key] += 1
            due = self._seen[key] >= self._after and key not in self._making and _memory_free_mib() > _NEEDED_MEMORY_MIB
            if due:
                self._making.add(key)
            return due

    def partial(self) -> tuple[Path, int]:
        """A new file to be published, and a descriptor for writing it."""
        path = self._root / "partial" / secrets.token_hex(12)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)

    def publish(self, key: str, partial: Path) -> None:
        """Puts a finished file under its key and drops the least recently used beyond the limit."""
        target = self._root / key / _FILE
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.rename(partial, target)
        kept = sorted(self._root.glob(f"*/{_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True)
        total = 0
        for path in kept:
            total += path.stat().st_size
            if total > self._limit:
                shutil.rmtree(path.parents[1], ignore_errors=True)


def header_plan(request: CompileRequest, tools: Toolchain, plan: BuildPlan) -> BuildPlan:
    """The plan that makes the header for a request whose own plan is `plan`."""
    flags = header_flags(request, tools) or ()
    source = os.path.join(tools.torch_root, "include", "torch", "extension.h")
    command = (tools.cxx, *flags, "-x", "c++-header", source, "-o", _FILE.name)
    return replace(plan, files=(), objects=(command,), link=(), output=_FILE.name)


def header_limits(limits: Limits) -> Limits:
    """Room for a header where a candidate's build would be ended."""
    return replace(limits, output_mib=max(limits.output_mib, _SIZE_MIB))


def _memory_free_mib() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) >> 10
    return 0
