"""A CUDA runtime without a device: memory that every process forked after this import shares, at one address.

It stands in for `evaluator.worker.cudart`: a zygote imports it before it forks, so that a handle of one process names
memory in another. Copies and fills are queued as on a device, in the order of the default stream; `side` is work on a
stream that nobody joins, which only `wait` waits for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable

import torch

from evaluator.device import Device, open_device

REGION_BYTES = 1 << 30
_PAGE = 4096
_region = mmap.mmap(-1, REGION_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x4000)
_base = ctypes.addressof(ctypes.c_char.from_buffer(_region))
_cursor = ctypes.c_uint64.from_buffer(_region)


class FakeError(RuntimeError):
    """What a real runtime would refuse."""


class FakeRuntime:
    """One process's view of the shared memory."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.opened = False
        self.sizes: dict[int, int] = {}
        self.mapped: set[int] = set()
        self.queue: list[Callable[[], object]] = []
        self.side: list[Callable[[], object]] = []
        self.l2_resets = 0
        self.leads: list[int] = []
        self.events: list[int] = []

    def open(self) -> None:
        self.opened = True

    def malloc(self, nbytes: int) -> int:
        if not self.opened:
            raise FakeError("no context")
        offset = _PAGE + int(_cursor.value)
        size = -(-nbytes // _PAGE) * _PAGE
        if offset + size > REGION_BYTES:
            raise FakeError("out of memory")
        _cursor.value += size
        self.sizes[_base + offset] = size
        return _base + offset

    def free(self, address: int) -> None:
        size = self.sizes.pop(address)
        _region.madvise(mmap.MADV_REMOVE, address - _base, size)

    def export(self, address: int) -> bytes:
        if address not in self.sizes:
            raise FakeError("not an allocation of its own")
        return b"FAKE" + address.to_bytes(8, "little") + bytes(52)

    def open_handle(self, raw: bytes) -> int:
        if not self.opened or raw[:4] != b"FAKE" or len(raw) != 64:
            raise FakeError("not a handle")
        address = int.from_bytes(raw[4:12], "little")
        if address in self.mapped or address in self.sizes:
            raise FakeError("already mapped here")
        self.mapped.add(address)
        return address

    def close_handle(self, address: int) -> None:
        self.mapped.remove(address)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self.queue.append(lambda: ctypes.memmove(target, source, nbytes))

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        self.queue.append(lambda: ctypes.memset(address, byte, nbytes))

    def occupy(self, address: int, nbytes: int, lead_ns: int) -> None:
        self.leads.append(lead_ns)
        self.fill(address, 0, nbytes)

    def event(self) -> int:
        self.events.append(0)
        return len(self.events) - 1

    def record(self, event: int) -> None:
        self.wait_stream()
        self.events[event] = time.perf_counter_ns()

    def elapsed_ns(self, begin: int, end: int) -> int:
        return self.events[end] - self.events[begin]

    def wait(self) -> None:
        self.wait_stream()
        while self.side:
            self.side.pop(0)()

    def wait_stream(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def reset_persisting_l2(self) -> None:
        self.l2_resets += 1

    def l2_bytes(self) -> int:
        return 1 << 16

    def memory(self) -> tuple[int, int]:
        return REGION_BYTES - int(_cursor.value), REGION_BYTES

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        self.wait_stream()  # torch's own work comes after it on the same stream
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    def trim(self) -> None:
        """Nothing is cached."""


def load() -> FakeRuntime:
    """The runtime of this process."""
    return FakeRuntime()


def fake_device() -> Device:
    """The CPU, driven as a CUDA device: three processes, arenas by handles, spans that end with the snapshot."""
    plain = open_device("cpu")
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(here))
    return Device(
        name="cuda:0", type="cpu", arm_cores=plain.arm_cores, judge_cores=plain.judge_cores,
        lock_path=plain.lock_path, runtime="fake_cuda", modules=("fake_cuda",),
        environment=(("PYTHONPATH", os.pathsep.join((root, here))),),
    )  # fmt: skip
