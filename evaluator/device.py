"""What differs between devices: the arms' cores, what a worker may open, and the lock that makes timing exclusive.

Invariants: the lock is a flock on the device's own node, so that it leaves no file, needs no cleaning and is free as
soon as the last process that inherited it is gone; only judge, zygote and reference server hold its descriptor; whoever
works on an accelerator holds it shared, for a turn, while nobody times there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import KontrastError, UsageError


class DeviceBusy(KontrastError):
    """Another evaluator holds the device."""

    exit_code = 3


@dataclass(frozen=True)
class Device:
    """One device as the evaluator sees it."""

    name: str
    """`cpu` or `cuda:0`."""
    type: str
    """`cpu`, `H100`, ...: the key of pools, buckets and measurements."""
    arm_cores: tuple[int, ...]
    """Cores of both arms."""
    judge_cores: tuple[int, ...]
    """Cores of everything else."""
    lock_path: str
    nodes: tuple[str, ...] = ()
    """Device files that a worker may open."""
    runtime: str = ""
    """Module that `evaluator.worker.backend` makes the backend of; empty for the CPU's."""
    environment: tuple[tuple[str, str], ...] = ()
    """What the zygote and its children have in their environment for this device."""
    modules: tuple[str, ...] = ()
    """What the zygote imports beside torch, where it is installed; it must not touch the device."""
    uuid: str = ""
    """The driver's name of the device, for its gauges."""


def host_memory() -> tuple[int, int]:
    """Free memory of this machine, and all that it has, in bytes."""
    found = {}
    with open("/proc/meminfo") as file:
        for line in file:
            name, value = line.split(":")
            found[name] = int(value.split()[0]) * 1024
    return found.get("MemAvailable", 0), found.get("MemTotal", 0)


def open_device(name: str = "cpu", threads: int = 1) -> Device:
    """The device called `cpu`, `cuda` or `cuda:1`; raises UsageError for one that this machine does not have."""
    if name.split(":")[0] == "cuda":
        from evaluator.device_cuda import open_cuda

        return open_cuda(name)
    if name != "cpu":
        raise UsageError(f"there is no device {name!r}: use cpu, cuda or cuda:INDEX")
    cores = sorted(os.sched_getaffinity(0))
    arms = tuple(cores[-threads:]) if len(cores) > threads else tuple(cores)
    rest = tuple(core for core in cores if core not in arms) or tuple(cores)
    return Device("cpu", "cpu", arms, rest, _cpu_node(arms[0]))


def _cpu_node(core: int) -> str:
    node = Path(f"/sys/devices/system/cpu/cpu{core}")
    return str(node) if node.is_dir() else str(Path(tempfile.gettempdir()) / f"kontrast-cpu{core}.lock")


class DeviceLock:
    """The right to use a device: one evaluator's alone while it times, or many evaluators' for single turns between.

    Whoever wants the device takes the gate first, so that turns in an endless row keep no timing waiting. Only an
    accelerator is `shared`: on a CPU a timing has cores of its own.
    """

    def __init__(self, path: str, *, shared: bool = False) -> None:
        self.path = path
        self.descriptor = _opened(path)
        name = f"kontrast-{hashlib.sha256(path.encode()).hexdigest()[:16]}.gate"
        self._gate = _opened(os.path.join(tempfile.gettempdir(), name)) if shared else -1
        self._alone = False
        self._turn = False

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[float]:
        """Holds the device alone; yields the seconds that it was waited for. Raises DeviceBusy."""
        waited_s = self._acquire(fcntl.LOCK_EX, timeout_s)
        self._alone = True
        try:
            yield waited_s
        finally:
            self._alone = False
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    @contextmanager
    def turn(self, timeout_s: float) -> Iterator[float]:
        """Uses a shared device beside other evaluators' turns; yields the seconds that it was waited for.

        Nothing to wait for while this evaluator holds the device alone. Raises DeviceBusy.
        """
        if self._gate < 0 or self._alone or self._turn:
            yield 0.0
            return
        waited_s = self._acquire(fcntl.LOCK_SH, timeout_s)
        self._turn = True
        try:
            yield waited_s
        finally:
            self._turn = False
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    @contextmanager
    def lent(self, timeout_s: float) -> Iterator[None]:
        """Gives the device up in the middle of a turn, which does not use it for a while. Raises DeviceBusy."""
        if not self._turn:
            yield
            return
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        try:
            yield
        finally:
            self._acquire(fcntl.LOCK_SH, timeout_s)

    def _acquire(self, kind: int, timeout_s: float) -> float:
        begin = time.monotonic()
        if self._gate >= 0:
            self._wait(self._gate, fcntl.LOCK_EX, begin + timeout_s, timeout_s)
        try:
            self._wait(self.descriptor, kind, begin + timeout_s, timeout_s)
        finally:
            if self._gate >= 0:
                fcntl.flock(self._gate, fcntl.LOCK_UN)
        return time.monotonic() - begin

    def _wait(self, descriptor: int, kind: int, until: float, timeout_s: float) -> None:
        pause_s = 0.001
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    text = f"another evaluator has held {self.path} for {timeout_s:g} s: wait for it or end it"
                    raise DeviceBusy(text) from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.01)
            else:
                return

    def close(self) -> None:
        """Closes this process's descriptor."""
        for number in (self.descriptor, self._gate):
            if number >= 0:
                os.close(number)
        self.descriptor = self._gate = -1


def _opened(path: str) -> int:
    """A descriptor to lock: a file that is made here can be opened, and so locked, by every user of the machine."""
    flags = os.O_RDONLY if os.path.exists(path) else os.O_RDWR | os.O_CREAT
    return os.open(path, flags | os.O_CLOEXEC, 0o644)


@dataclass(frozen=True)
class DeviceTurn:
    """A device's lock as an arm uses it. `timeout_s` is how long it waits."""

    lock: DeviceLock
    timeout_s: float

    def taken(self) -> AbstractContextManager[float]:
        """For a turn; yields the seconds that it was waited for."""
        return self.lock.turn(self.timeout_s)

    def lent(self) -> AbstractContextManager[None]:
        """Not in the middle of a turn."""
        return self.lock.lent(self.timeout_s)
