"""The process that forks builds: single-threaded, small, ended with the pool that started it.

    python -m evaluator.compile.server FD       # FD: the control end of a SOCK_SEQPACKET pair to the pool

Invariants: one thread at each fork; it never runs a compiler itself; it ends when the pool's end of the control socket
closes, and every build with it (parent-death signals are set again after each fork).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from evaluator.compile import job
from evaluator.worker import confine, syscalls  # noqa: F401  confine: imported once here, not in every build

_DESCRIPTORS = 3


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps; the pool learns from the reports
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, _DESCRIPTORS)
        if not data:
            return
        if len(descriptors) == _DESCRIPTORS:
            _fork(json.loads(data), descriptors, control)
        for number in descriptors:
            os.close(number)


def _fork(limits: dict[str, object], descriptors: list[int], control: socket.socket) -> None:
    server = os.getpid()
    if os.fork():
        return
    code = 70
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(71)
        control.close()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        plan, library, report = descriptors
        text = os.pread(plan, os.fstat(plan).st_size, 0)
        os.close(plan)
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in limits.items()}
        job.watch(json.loads(text), job.Limits(**settings), library, socket.socket(fileno=report))  # type: ignore[arg-type]
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
