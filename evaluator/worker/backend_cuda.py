"""The backend of one CUDA device: bursts of single calls with a cold L2 cache, by one of two clocks; arenas by handles.

The clock `device` (a lead above 0) shows what the device needs: a call's kernels are launched while another one still
holds the whole device, then run back to back between two events. The clock `latency` (no lead) shows what a caller
waits for: from the call, on an idle device, until the whole device is idle again, by the host's clock. On a virtual
machine the launch of one kernel takes 8 to 40 us from one turn to the next, and two processes on two cores differ by as
much throughout (docs/measurements/evaluator-cuda), so that only the first can tell kernels apart.

Invariants: before every call the device is idle, then its L2 cache is filled with other data and free of persisting
lines; with a lead the kernel that fills it holds every thread of the device, so that a candidate's side streams cannot
work in the lead; the next call begins when the whole device is idle, so that work on side streams counts in the judge's
span; the first call of a burst, which no estimate uses, has the longest lead, since its caller slept, and is delivered
in the order of the caller's stream, as a caller without a synchronisation would read it, so that work that this stream
does not wait for is missing from the result. Both arms run this code.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from evaluator.timing.clock import MOST_LEAD_NS
from evaluator.worker.arena import Arena
from evaluator.worker.arena_cuda import CudaArena, Runtime
from evaluator.worker.backend import POISON_BYTE, First
from evaluator.worker.burst import Burst

FLUSH_CACHES = 2
"""The flush writes this many times the L2 cache's size."""

_now_ns = time.perf_counter_ns
_gc_enable, _gc_disable = gc.enable, gc.disable
_no_grad = torch.no_grad
_median = statistics.median


class CudaBackend:
    """One process's side of a CUDA device."""

    shares_snapshots = False

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.device = runtime.device
        self._flush = 0
        self._flush_bytes = 0
        self._mapped: list[CudaArena] = []
        self._begin = self._end = 0

    def open(self) -> None:
        """Makes the context and the memory that the L2 cache is flushed with."""
        self.runtime.open()
        self._flush_bytes = max(1 << 20, FLUSH_CACHES * self.runtime.l2_bytes())
        self._flush = self.runtime.malloc(self._flush_bytes)
        self._begin, self._end = self.runtime.event(), self.runtime.event()
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

    def run_burst(
        self, model: Any, calls: list[list[Any]], first: First | None = None, lead_ns: int = 0
    ) -> Burst:  # fmt: skip
        results: list[Any] = [None] * len(calls)
        stamps, launches = [0], []
        runtime, begin, end = self.runtime, self._begin, self._end
        _gc_disable()
        try:
            with _no_grad():
                for index, inputs in enumerate(calls):
                    self._chill(lead_ns if index else lead_ns and MOST_LEAD_NS)
                    runtime.record(begin)
                    called_ns = _now_ns()
                    results[index] = model(*inputs)
                    launches.append(_now_ns() - called_ns)
                    runtime.record(end)
                    if index == 0 and first is not None:
                        runtime.wait_stream()
                        ended_ns = _now_ns()
                        first(results[0])
                        runtime.wait()
                    else:
                        runtime.wait()
                        ended_ns = _now_ns()
                    took_ns = runtime.elapsed_ns(begin, end) if lead_ns else ended_ns - called_ns
                    stamps.append(stamps[-1] + took_ns)
        finally:
            _gc_enable()
        return Burst(results, stamps, round(_median(launches)))

    def _chill(self, lead_ns: int) -> None:
        """A cold L2 cache; without a lead on an idle device, else on one that stays taken for so long."""
        self.runtime.reset_persisting_l2()
        if lead_ns:
            self.runtime.occupy(self._flush, self._flush_bytes, lead_ns)
        else:
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
