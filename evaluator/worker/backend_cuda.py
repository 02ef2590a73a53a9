"""The backend of one CUDA device: bursts by latency from an idle device with a cold L2 cache, arenas by IPC handles.

Invariants: every call begins on an idle device, its L2 cache filled with other data and free of persisting lines, and
ends when the whole device is idle again, so that work on side streams counts; the first call of a burst, which no
estimate uses, ends with the caller's stream alone and is delivered at once, as a caller without a synchronisation would
read it, so that work that the caller's stream does not wait for is missing from the result. Both arms run this code.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from evaluator.worker.arena import Arena
from evaluator.worker.arena_cuda import CudaArena, Runtime
from evaluator.worker.backend import POISON_BYTE, First

FLUSH_CACHES = 2
"""The flush writes this many times the L2 cache's size."""

_now_ns = time.perf_counter_ns
_gc_enable, _gc_disable = gc.enable, gc.disable
_no_grad = torch.no_grad


class CudaBackend:
    """One process's side of a CUDA device."""

    shares_snapshots = False

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.device = runtime.device
        self._flush = 0
        self._flush_bytes = 0
        self._mapped: list[CudaArena] = []

    def open(self) -> None:
        """Makes the context and the memory that the L2 cache is flushed with."""
        self.runtime.open()
        self._flush_bytes = max(1 << 20, FLUSH_CACHES * self.runtime.l2_bytes())
        self._flush = self.runtime.malloc(self._flush_bytes)
        self.runtime.wait()

    def arena(self, nbytes: int) -> Arena:
        return CudaArena.make(self.runtime, nbytes, exported=True)

    def private(self, nbytes: int) -> Arena:
        return CudaArena.make(self.runtime, nbytes, exported=False)

    def attach(self, descriptors: Sequence[int], handles: Sequence[list[Any]], drop: bool) -> list[Arena]:  # noqa: ARG002
        """Maps new arenas. Older ones stay mapped until `drop`, since a captured graph may hold their addresses."""
        if drop:
            self.runtime.wait()
            for arena in self._mapped:
                arena.close()
            self._mapped = []
        opened = [CudaArena.opened(self.runtime, handle) for handle in handles]
        self._mapped += opened
        return list(opened)

    def run_burst(self, model: Any, calls: list[list[Any]], first: First | None = None) -> tuple[list[Any], list[int]]:
        results: list[Any] = [None] * len(calls)
        stamps = [0]
        wait = self.runtime.wait
        _gc_disable()
        try:
            with _no_grad():
                for index, inputs in enumerate(calls):
                    self._chill()
                    begin = _now_ns()
                    results[index] = model(*inputs)
                    if index == 0 and first is not None:
                        self.runtime.wait_stream()
                        end = _now_ns()
                        first(results[0])
                        wait()
                    else:
                        wait()
                        end = _now_ns()
                    stamps.append(stamps[-1] + end - begin)
        finally:
            _gc_enable()
        return results, stamps

    def _chill(self) -> None:
        """An idle device with a cold L2 cache."""
        self.runtime.reset_persisting_l2()
        self.runtime.fill(self._flush, 0, self._flush_bytes)
        self.runtime.wait()

    def spoil(self, address: int, nbytes: int) -> None:
        self.runtime.fill(address, POISON_BYTE, nbytes)

    def settle(self) -> None:
        self.runtime.wait()

    def trim(self) -> None:
        self.runtime.trim()

    def memory(self) -> tuple[int, int]:
        return self.runtime.memory()
