"""Subprocesses that never outlive their owner, also when the owner is killed with SIGKILL.

A small supervisor stands between the two: it starts the program, and ends the program's whole process group when the
pipe to the owner closes. The kernel closes that pipe however the owner dies, and unlike PR_SET_PDEATHSIG alone it does
not depend on which thread of the owner started the program. The program itself gets PR_SET_PDEATHSIG from the
supervisor's only thread, so it dies with a killed supervisor too.

    python -m tasks.lifeline FD -- PROGRAM [ARGUMENT ...]     # what `spawn` runs
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

PR_SET_PDEATHSIG = 1
GRACE_S = 5.0
"""Between SIGTERM and SIGKILL when the owner is gone."""


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Asks the kernel to send `sig` to this process when the thread that forked it ends.

    Not inherited by fork: call it again in each child. The caller must check once afterwards that its parent is still
    alive, since a parent that died before the call sends nothing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, sig, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


class Owned:
    """A running program and the pipe that ties its life to this process.

    `process` is the supervisor: its exit code is the program's, its standard streams are the program's.
    """

    def __init__(self, process: subprocess.Popen[bytes], lifeline: int) -> None:
        self.process = process
        self._lifeline = lifeline

    def poll(self) -> int | None:
        """Exit code of the program, or None while it runs."""
        return self.process.poll()

    def stop(self, timeout_s: float = 2 * GRACE_S) -> int:
        """Closes the lifeline and waits: the program gets SIGTERM, after a grace SIGKILL. Safe to call twice."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()  # the program follows by its parent-death signal
            return self.process.wait()


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdout: int | IO[Any] | None = subprocess.DEVNULL,
    stderr: int | IO[Any] | None = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> Owned:
    """Starts a program in a process group of its own that ends when this process ends, whatever ends it.

    `pass_fds` are descriptors that the program gets under their own numbers; the supervisor closes its copies.

    Raises OSError when the supervisor cannot start; a program that cannot be executed ends with exit code 127.
    """
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(read_end), "--", *argv],
            pass_fds=(read_end, *pass_fds), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            env=None if env is None else dict(env), cwd=cwd, start_new_session=True,
        )  # fmt: skip
    except OSError:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return Owned(process, write_end)


def _supervise(lifeline: int, argv: list[str]) -> int:
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        die_with_parent()
        if os.getppid() == 1:
            os._exit(126)
        os.close(lifeline)
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)
    # Signals are for the program alone; set after the fork, since an ignored signal is inherited.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(PermissionError):  # the child has already made its group and executed the program
        os.setpgid(child, child)
    _close_all_but(lifeline)
    pidfd = os.pidfd_open(child)
    ready, _, _ = select.select([lifeline, pidfd], [], [])
    if pidfd not in ready:
        _signal_group(child, signal.SIGTERM)
        select.select([pidfd], [], [], GRACE_S)
    status = os.waitpid(child, os.WNOHANG)[1] if pidfd in ready else None
    _signal_group(child, signal.SIGKILL)  # the program's own children as well
    if status is None:
        status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _close_all_but(lifeline: int) -> None:
    os.closerange(3, lifeline)
    os.closerange(lifeline + 1, os.sysconf("SC_OPEN_MAX"))


def _signal_group(group: int, sig: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, sig)


if __name__ == "__main__":
    sys.exit(_supervise(int(sys.argv[1]), sys.argv[3:]))
