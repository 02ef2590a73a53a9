"""The one place that speaks to landlock and seccomp: what a worker may read, write, execute and call.

Invariants: landlock is applied single-threaded, after the mounts, before candidate code; the first seccomp filter
stands from load on, the second (`seal`) is added to all threads before the first secret input. Denied calls fail with
an errno, so that honest code sees an ordinary error; a foreign architecture kills the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterable
from functools import cache

import landlockpy
import seccompy
from landlockpy import AccessFS, Scope
from seccompy import CmpOp, Filter, FilterFlag

READ = AccessFS.READ_FILE | AccessFS.READ_DIR
READ_EXECUTE = READ | AccessFS.EXECUTE
DEVICE = AccessFS.READ_FILE | AccessFS.WRITE_FILE | AccessFS.TRUNCATE | AccessFS.IOCTL_DEV
OWN = (
    READ | AccessFS.WRITE_FILE | AccessFS.TRUNCATE | AccessFS.MAKE_REG | AccessFS.MAKE_DIR | AccessFS.MAKE_SYM
    | AccessFS.REMOVE_FILE | AccessFS.REMOVE_DIR | AccessFS.REFER
)  # fmt: skip
"""All but execution: what a candidate writes it cannot run (it may still map it as a library)."""

X32_BIT = 0x40000000
"""System call numbers of the x32 ABI pass the architecture check, so they are denied by number as well."""

_CLONE_THREAD = 0x00010000
_CLONE_NEW_NAMESPACE = 0x7E020080

_NEVER = (
    "setsid", "setpgid", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal", "pidfd_getfd",
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "mount", "umount2", "pivot_root",
    "chroot", "move_mount", "open_tree", "fsopen", "fsmount", "fsconfig", "mount_setattr", "unshare", "setns", "bpf",
    "perf_event_open", "add_key", "request_key", "keyctl", "userfaultfd", "io_uring_setup", "io_uring_enter",
    "io_uring_register", "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot",
    "swapon", "swapoff", "acct", "quotactl", "open_by_handle_at", "sched_setaffinity", "sched_setscheduler",
    "sched_setattr", "setpriority", "personality", "seccomp_unotify", "connect", "accept", "accept4",
)  # fmt: skip


def landlock_available() -> bool:
    """Whether this kernel can restrict a process by landlock."""
    return bool(landlockpy.supported())


def seccomp_available() -> bool:
    """Whether this kernel can filter a process's system calls."""
    return bool(seccompy.supported())


def restrict_files(
    *, read: Iterable[str], execute: Iterable[str], own: Iterable[str], devices: Iterable[str] = (),
    notes: Iterable[str] = (), whole: Iterable[str] = (),
) -> None:  # fmt: skip
    """Confines this process to the given trees, without TCP, abstract sockets or signals to the outside.

    `own` may be written, `execute` also run; in `notes` existing files may be written and cut (a driver names its
    threads there), in `whole` everything is allowed. Paths that do not exist are left out. Raises OSError where the
    kernel refuses.
    """
    with landlockpy.Ruleset(scoped=Scope.ABSTRACT_UNIX_SOCKET | Scope.SIGNAL) as ruleset:
        grants = (
            (read, READ), (execute, READ_EXECUTE), (own, OWN), (devices, DEVICE),
            (notes, READ | AccessFS.WRITE_FILE | AccessFS.TRUNCATE), (whole, ruleset.handled_fs),
        )  # fmt: skip
        for paths, access in grants:
            for path in paths:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    ruleset.allow_path(path, access if os.path.isdir(path) else access & _FILE_RIGHTS)
        ruleset.restrict()


_FILE_RIGHTS = AccessFS.READ_FILE | AccessFS.WRITE_FILE | AccessFS.EXECUTE | AccessFS.TRUNCATE | AccessFS.IOCTL_DEV


def prepare() -> None:
    """Makes the usual programs once, in the process that forks workers: assembling them takes longer than loading."""
    for filter_ in (_calls(1, False), _sealing()):
        len(filter_.program)


def filter_calls(*, accelerator: bool = False) -> None:
    """The filter that stands from load on: no sessions, signals to others, namespaces, debugging or sockets.

    The CUDA driver does not start where it may not make a Unix socket, bind it and listen (error 304;
    docs/measurements/evaluator-cuda): an accelerator's worker may do these, and neither connect nor accept.
    """
    _calls(os.getpid(), accelerator).load()


def seal() -> None:
    """Forbids new programs and new processes to all threads; new threads stay allowed."""
    _sealing().load()


@cache
def _calls(pid: int, accelerator: bool) -> Filter:
    """The filter for the process `pid`, the only one that it may send signals to."""
    filter_ = Filter(flags=FilterFlag.SPEC_ALLOW)
    for name in _NEVER:
        _deny(filter_, name, errno.EPERM)
    for name in ("kill", "tgkill"):
        _deny(filter_, name, errno.EPERM, [(0, CmpOp.NE, pid)])
    _deny(filter_, "socket", errno.EPERM, [(0, CmpOp.NE, socket.AF_UNIX)] if accelerator else None)
    for name in () if accelerator else ("bind", "listen"):
        _deny(filter_, name, errno.EPERM)
    _deny_clone3(filter_)
    for bit in range(32):  # a masked comparison tests one value, so each namespace flag has its own rule
        flag = 1 << bit
        if flag & _CLONE_NEW_NAMESPACE:
            _deny(filter_, "clone", errno.EPERM, [(0, CmpOp.MASKED_EQ, flag, flag)])
    return filter_


@cache
def _sealing() -> Filter:
    filter_ = Filter(flags=FilterFlag.TSYNC | FilterFlag.SPEC_ALLOW)
    for name in ("execve", "execveat", "fork", "vfork"):
        _deny(filter_, name, errno.EPERM)
    _deny(filter_, "clone", errno.EPERM, [(0, CmpOp.MASKED_EQ, 0, _CLONE_THREAD)])
    _deny_clone3(filter_)
    return filter_


def _deny(filter_: Filter, name: str, number: int, args: list[tuple[int, ...]] | None = None) -> None:
    try:
        native = seccompy.syscall_nr(name)
    except (KeyError, ValueError):
        return  # a call that this architecture does not have
    for call in (native, native | X32_BIT):
        filter_.errno(call, number, args=args)  # type: ignore[arg-type]


def _deny_clone3(filter_: Filter) -> None:
    _deny(filter_, "clone3", errno.ENOSYS)  # its flags lie behind a pointer; the C library then uses clone
