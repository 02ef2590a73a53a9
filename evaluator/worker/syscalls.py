"""The few Linux calls that Python 3.11 has no binding for: unshare, mount, prctl, close_range.

Invariant: every function raises OSError with the call's errno; none retries or falls back.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_NEWIPC = 0x08000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Moves this process (pid namespaces: its next children) into new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode() or None)
    _check(result, f"mount {target}")


def prctl(option: int, argument: int | bytes) -> None:
    """prctl(2) with one argument, a number or a string."""
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    _check(_libc.prctl(ctypes.c_int(option), value, 0, 0, 0), "prctl")


def close_descriptors(keep: set[int]) -> None:
    """Closes every descriptor of this process but `keep`, in ranges."""
    first = 0
    for number in [*sorted(keep), 1 << 31]:
        if number > first:
            _check(_libc.close_range(ctypes.c_uint(first), ctypes.c_uint(number - 1), 0), "close_range")
        first = number + 1
