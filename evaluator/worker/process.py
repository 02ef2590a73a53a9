"""The judge's handles on its other processes: the zygote, and each child that was forked from it.

Invariants: the judge can stop, continue and kill a child's whole process group at any time; a child is stopped only
when every one of its threads is seen stopped; `kill` returns when nothing of the child is left. No handle is shared
between threads.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evaluator.worker import wire
from evaluator.worker.allocator import variables
from evaluator.worker.sandbox import SandboxPlan, import_path
from tasks.lifeline import Owned, spawn

ROOT = Path(__file__).resolve().parents[2]
_KEPT_VARIABLES = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "TZ",
    "VIRTUAL_ENV",
)
"""What a worker inherits of the environment: nothing that could be a secret."""


_PREFERRED = -19
_CPUCLOCK_SCHED = 2


class ProcessLost(RuntimeError):
    """The zygote or one of its children is gone or does not answer."""


class Child:
    """One forked process: its channel, its group and, for a worker, the socket that tells how it ended."""

    def __init__(self, channel: socket.socket, pid: int, group: int, status: socket.socket | None = None) -> None:
        self.channel = channel
        self.pid = pid
        self.group = group
        self._status = status
        self.scratch = ""
        """Folder to remove with the process; most workers have theirs in memory and leave nothing."""
        self.exit_code: int | None = None
        self.closed = False

    def stop(self, timeout_s: float = 20.0) -> int:
        """Stops the group; returns the monotonic time in ns at which every thread was seen stopped.

        Raises ProcessLost when the process is gone or cannot be stopped in time.
        """
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + timeout_s
        while not self.stopped():
            if time.monotonic() > deadline:
                raise ProcessLost(f"process {self.pid} could not be stopped")
        return time.perf_counter_ns()

    def alive(self) -> bool:
        """Whether the process is there and no zombie."""
        try:
            return _state(f"/proc/{self.pid}/stat") not in "ZX"
        except OSError:
            return False

    def resume(self) -> None:
        """Lets the group go on."""
        self._signal(signal.SIGCONT)

    def stopped(self) -> bool:
        """Whether every thread is stopped; raises ProcessLost when there is none left."""
        try:
            threads = os.listdir(f"/proc/{self.pid}/task")
            states = [_state(f"/proc/{self.pid}/task/{thread}/stat") for thread in threads]
        except OSError as error:
            raise ProcessLost(f"process {self.pid} is gone") from error
        if not states or all(state in "ZX" for state in states):
            raise ProcessLost(f"process {self.pid} is gone")
        return all(state in "TtZX" for state in states)

    def rss_bytes(self) -> int:
        """Anonymous and private resident memory, shared arenas left out; 0 when the process is gone."""
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{self.pid}/statm") as file:
            fields = file.read().split()
            return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGESIZE")
        return 0

    def cpu_ns(self) -> tuple[int, int]:
        """Processor time of all threads, ended ones too, and time that living ones waited for a processor.

        Both by the kernel's accounts; zeros when the process is gone.
        """
        ran = waited = 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            ran = time.clock_gettime_ns((~self.pid << 3) | _CPUCLOCK_SCHED)  # what clock_getcpuclockid(3) makes
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                with open(f"/proc/{self.pid}/task/{thread}/schedstat") as file:
                    waited += int(file.read().split()[1])
        return ran, waited

    def prefer(self, preferred: bool) -> None:
        """Lets the process go before all others on its cores, where that is permitted; its later threads inherit it."""
        nice = _PREFERRED if preferred else 0
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PGRP, self.group, nice)
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/autogroup", "w") as file:
            file.write(str(nice))  # where each session is scheduled as one, its own nice value is what counts

    def threads(self) -> int:
        """Number of threads; 0 when the process is gone."""
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self.pid}/task"))
        return 0

    def descendants(self) -> int:
        """Processes that the worker or its offspring has started and that still live, whoever is their parent now.

        Work that they do is in no account of the worker's.
        """
        return sum(pid != self.pid for pid in _offspring(self.group))

    def poll_exit(self, timeout_s: float = 0.0) -> int | None:
        """The worker's exit code (negative: signal) once it has ended, else None."""
        if self.exit_code is None and self._status is not None:
            with contextlib.suppress(wire.WireTimeout, wire.WireClosed, wire.WireForged, OSError):
                self.exit_code = int(wire.receive(self._status, timeout_s).get("code", 255))
        return self.exit_code

    def kill(self) -> None:
        """Ends the whole group and waits until its sockets are closed by the kernel. Safe to call twice."""
        if self.closed:
            return
        self.closed = True
        self._signal(signal.SIGKILL)
        for end in (self.channel, self._status):
            if end is not None:
                _drain(end)
                end.close()
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, number)


class Zygote:
    """Starts the zygote, which has one thread, and forks children from it, which use `threads`.

    It inherits `lock_descriptor`, so that a lock held through it is free only when it is gone, and removes the folder
    `scratch` when it ends. It and its children run with the library of `allocator`, a descriptor, where that is one.
    """

    def __init__(
        self, *, threads: int = 1, lock_descriptor: int = -1, environment: Mapping[str, str] | None = None,
        modules: Sequence[str] = (), scratch: str = "", allocator: int = -1,
    ) -> None:  # fmt: skip
        self._threads = threads
        self._lock = lock_descriptor
        self._scratch = scratch
        self._allocator = allocator
        self._environment = dict(environment or {})
        self._modules = list(modules)
        self._control: socket.socket | None = None
        self._owned: Owned | None = None
        self.pid = 0

    def start(self, timeout_s: float = 60.0) -> None:
        """Starts the process and waits until it has imported torch. Raises ProcessLost."""
        ours, theirs = wire.pair()
        descriptors = [theirs.fileno(), *(number for number in (self._lock, self._allocator) if number >= 0)]
        self._owned = spawn(
            [sys.executable, "-m", "evaluator.worker.zygote", str(theirs.fileno())],
            env=self._variables(), cwd="/", pass_fds=descriptors, stderr=None,
        )  # fmt: skip
        theirs.close()
        self._control = ours
        settings = {"threads": self._threads, "modules": self._modules, "scratch": self._scratch}
        wire.send(ours, {"op": "start", **settings})
        self.pid = int(self._ask(timeout_s)["pid"])

    def _variables(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        return {
            **kept, "PYTHONPATH": import_path(), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "USER": "worker", "LOGNAME": "worker", **variables(self._allocator),
            **self._environment,
        }  # fmt: skip

    def spawn_worker(self, plan: SandboxPlan, settings: dict[str, Any] | None = None, timeout_s: float = 10.0) -> Child:
        """Forks a sandboxed worker; its first packet (`ready` with the layers, or `failed`) is on its channel."""
        channel, theirs = wire.pair()
        status, reporter = wire.pair()
        request = {"op": "fork", "role": "worker", "sandbox": asdict(plan), **(settings or {})}
        group = self._fork(request, [theirs, reporter], timeout_s)
        try:
            born = wire.receive(status, timeout_s)
        except (wire.WireClosed, wire.WireTimeout) as error:
            raise ProcessLost("the worker could not be forked") from error
        if born.get("op") != "born":
            raise ProcessLost(f"the worker could not be forked: {born.get('text', '')}")
        child = Child(channel, int(born["pid"]), group, status)
        child.scratch = plan.fallback_scratch
        return child

    def spawn_reference(self, settings: dict[str, Any] | None = None, timeout_s: float = 10.0) -> Child:
        """Forks a reference server."""
        channel, theirs = wire.pair()
        pid = self._fork({"op": "fork", "role": "reference", **(settings or {})}, [theirs], timeout_s)
        try:
            wire.receive(channel, timeout_s)  # it leads a group of its own from here on
        except (wire.WireClosed, wire.WireTimeout) as error:
            raise ProcessLost("the reference server could not be forked") from error
        return Child(channel, pid, pid)

    def _fork(self, request: dict[str, Any], ends: list[socket.socket], timeout_s: float) -> int:
        if self._control is None:
            raise ProcessLost("the zygote is not running")
        try:
            wire.send(self._control, request, [end.fileno() for end in ends])
        except wire.WireClosed as error:
            raise ProcessLost("the zygote is gone") from error
        finally:
            for end in ends:
                end.close()
        return int(self._ask(timeout_s)["pid"])

    def _ask(self, timeout_s: float) -> wire.Message:
        assert self._control is not None
        try:
            answer = wire.receive(self._control, timeout_s)
        except (wire.WireClosed, wire.WireTimeout) as error:
            raise ProcessLost("the zygote is gone or does not answer") from error
        if "pid" not in answer:
            raise ProcessLost(f"the zygote refused: {answer.get('text', '')}")
        return answer

    def alive(self) -> bool:
        """Whether the zygote still runs."""
        if self._owned is None or self._owned.poll() is not None:
            return False
        try:
            return _state(f"/proc/{self.pid}/stat") not in "ZX"
        except OSError:
            return False

    def close(self) -> None:
        """Ends the zygote and with it every child. Safe to call twice."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._owned is not None:
            self._owned.stop()
            self._owned = None


def _offspring(pid: int) -> Iterator[int]:
    """All living processes below this one."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children = [int(child) for child in file.read().split()]
            for child in children:
                if _state(f"/proc/{child}/stat") not in "ZX":
                    yield child
                yield from _offspring(child)


def _state(path: str) -> str:
    with open(path) as file:
        return file.read().rsplit(")", 1)[1].split(None, 1)[0]


def _drain(end: socket.socket, timeout_s: float = 5.0) -> None:
    """Reads until end of file, which comes when the last process that held the other end is gone."""
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    poller.register(end, select.POLLIN)
    while time.monotonic() < deadline and poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        try:
            if not end.recv(1):
                return
        except OSError:
            return
