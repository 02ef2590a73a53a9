"""A device as the processes that work on it use it: the CPU, or one CUDA device.

Invariants: what lies above knows arenas, bursts and the words here, never which device it is; a worker and the
reference server make their own backend after the fork; `open` is the first touch of the device.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from evaluator.device import host_memory
from evaluator.worker import allocator, burst
from evaluator.worker.arena import Arena

_memset = ctypes.memset
POISON_BYTE = 0xFF
"""What memory is overwritten with that no result may lie in: NaN in every floating type."""

First = Callable[[Any], None]
"""Delivers the first call's result."""


class Backend(Protocol):
    """What differs between devices in a worker and in the reference server."""

    device: torch.device
    """Where tensors of the task lie."""
    shares_snapshots: bool
    """Whether results stay put while the worker is stopped, so that they may be taken away after the span."""

    def open(self) -> None:
        """Makes this process's context on the device."""

    def arena(self, nbytes: int) -> Arena:
        """New memory that another process can map."""

    def private(self, nbytes: int) -> Arena:
        """New memory for this process alone."""

    def attach(self, descriptors: Sequence[int], handles: Sequence[list[Any]], drop: bool) -> list[Arena]:
        """Maps what another process's arenas are known by; with `drop` nothing mapped before may stay mapped."""

    def run_burst(
        self, model: Any, calls: list[list[Any]], first: First | None = None, lead_ns: int = 0
    ) -> burst.Burst:  # fmt: skip
        """Calls the model once per input list.

        Where the device works on after a call has returned, `first` gets the first call's result in the order of the
        caller's stream, before anything else is waited for, and a caller has `lead_ns` to launch a call's work before
        its time begins; with 0 the time begins with the call, on an idle device.
        """

    def spoil(self, address: int, nbytes: int) -> None:
        """Overwrites memory of this process on the device."""

    def settle(self) -> None:
        """Waits until the device has done all work of this process."""

    def trim(self) -> None:
        """Gives memory that is not in use back to the device."""

    def memory(self) -> tuple[int, int]:
        """Free memory of the device, and all that it has."""


class CpuBackend:
    """Memory files; results are there when a call returns."""

    device = torch.device("cpu")
    shares_snapshots = True

    def __init__(self) -> None:
        self._release = allocator.release()

    def open(self) -> None:
        """Nothing to do."""

    def arena(self, nbytes: int) -> Arena:
        return Arena.create(nbytes)

    def private(self, nbytes: int) -> Arena:
        return Arena.create(nbytes)

    def attach(self, descriptors: Sequence[int], handles: Sequence[list[Any]], drop: bool) -> list[Arena]:  # noqa: ARG002
        return [Arena.attach(number) for number in descriptors]

    def run_burst(
        self, model: Any, calls: list[list[Any]], first: First | None = None, lead_ns: int = 0  # noqa: ARG002
    ) -> burst.Burst:  # fmt: skip
        return burst.run_burst(model, calls)

    def spoil(self, address: int, nbytes: int) -> None:
        _memset(address, POISON_BYTE, nbytes)

    def settle(self) -> None:
        """Nothing runs on."""

    def trim(self) -> None:
        """Gives free memory back to the kernel, so that what comes next lies on other pages."""
        self._release()

    def memory(self) -> tuple[int, int]:
        return host_memory()


def create(runtime: str) -> Backend:
    """The backend of a runtime: a module with `load()`, such as `evaluator.worker.cudart`; the CPU's without a name."""
    if not runtime:
        return CpuBackend()
    from evaluator.worker.backend_cuda import CudaBackend

    return CudaBackend(importlib.import_module(runtime).load())
