"""The arms' memory allocator (allocator.c): built once per judge, preloaded into each zygote.

Invariants: it is there for both arms or for neither; it lies in memory alone, so that nothing is left of it; without a
C compiler, or where the dynamic linker does not take it, the C library's own serves, and the log says so once.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("allocator.c")
_COMPILERS = ("cc", "gcc", "g++", "clang")
_VARIABLE = "LD_PRELOAD"
_LIMIT_S = 60.0
_TRIAL = "import ctypes, sys; sys.exit(not hasattr(ctypes.CDLL(None), 'kontrast_release'))"


@cache
def library() -> int:
    """Descriptor of the library, built at the first call; -1 where that does not work."""
    try:
        return build()
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        _log.warning(
            "both arms use the C library's allocator, under which a process's past can decide its speed: %s",
            said.splitlines()[-1],
        )
        return -1


def build() -> int:
    """Builds the library into a memory file and tries it; raises OSError or what `subprocess.run` raises."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError("there is no C compiler: install gcc")
    with tempfile.TemporaryDirectory(prefix="kontrast-") as folder:
        target = Path(folder) / "allocator.so"
        command = [compiler, "-x", "c", "-O2", "-shared", "-fPIC", "-o", str(target), str(_SOURCE), "-lpthread", "-ldl"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT_S)
        data = target.read_bytes()
    descriptor = os.memfd_create("allocator", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, data)
        trial = [sys.executable, "-I", "-S", "-c", _TRIAL]
        environment = variables(descriptor)
        subprocess.run(
            trial, check=True, capture_output=True, text=True, timeout=_LIMIT_S, env=environment, pass_fds=[descriptor]
        )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def variables(descriptor: int) -> dict[str, str]:
    """The environment under which a program that inherits the descriptor loads the library."""
    return {_VARIABLE: f"/proc/self/fd/{descriptor}"} if descriptor >= 0 else {}


def loaded() -> None:
    """Called by the program that it was loaded into: its own programs do without it."""
    path = os.environ.pop(_VARIABLE, "")
    if path:
        with contextlib.suppress(OSError, ValueError):
            os.close(int(path.rpartition("/")[2]))


@cache
def release() -> Callable[[], None]:
    """Gives all free large blocks of this process back to the kernel; does nothing where the library is not loaded."""
    function = getattr(ctypes.CDLL(None), "kontrast_release", None)
    if function is None:
        return lambda: None
    function.argtypes, function.restype = [], None
    return function  # type: ignore[no-any-return]
