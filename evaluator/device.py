"""What differs between devices: the arms' cores, what a worker may open, and the lock that makes timing exclusive.

Invariants: the lock is a flock on the device's own node, so that it leaves no file, needs no cleaning and is free as
soon as the last process that inherited it is gone; only judge, zygote and reference server hold its descriptor.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    """The exclusive right to time on a device."""

    def __init__(self, path: str) -> None:
        flags = os.O_RDONLY if os.path.exists(path) else os.O_RDWR | os.O_CREAT
        self.path = path
        self.descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[float]:
        """Holds the lock; yields the seconds that it was waited for. Raises DeviceBusy."""
        begin = time.monotonic()
        while not self._try():
            if time.monotonic() - begin > timeout_s:
                raise DeviceBusy(f"another evaluator has held {self.path} for {timeout_s:g} s: wait for it or end it")
            time.sleep(0.01)
        try:
            yield time.monotonic() - begin
        finally:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def _try(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Closes this process's descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
