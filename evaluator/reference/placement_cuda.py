"""Placement on a CUDA device: both arms map expendable copies, and what is true lies in memory that is never exported.

Invariants: the reference arm's results are taken into private memory and wiped from the arena that it maps before
anybody else gets a turn; exported arenas are freed only after every worker has given them up: at `forget`, when the
workers are gone, or one placement after `drop` told them to.
"""

from __future__ import annotations

import random
from typing import Any

from evaluator.reference.placement import Placement
from evaluator.reference.reference import Reference
from evaluator.worker.arena import Arena, Slot
from evaluator.worker.backend import POISON_BYTE, Backend

RETIRED_SHARE = 16
"""Arenas of earlier placements are kept up to this part of the device's memory."""


class CudaPlacement(Placement):
    """Arenas of one CUDA device."""

    def __init__(self, reference: Reference, backend: Backend) -> None:
        super().__init__(reference, backend)
        self._arm_inputs = self._arm_outputs = self.shared_inputs
        self._current: list[Arena] = []
        self._retired: list[Arena] = []
        self._doomed: list[Arena] = []

    def make(self, count: int, rng: random.Random) -> list[Arena]:
        _close(self._doomed)
        self._retired += self._current
        kept = sum(arena.nbytes for arena in self._retired)
        self.drop = kept > self._backend.memory()[1] // RETIRED_SHARE
        self._doomed = self._retired if self.drop else []
        self._retired = [] if self.drop else self._retired
        self._backend.trim()
        self._current = super().make(count, rng)
        return self._current

    def _allocate(self, total_in: int, total_out: int) -> tuple[Arena, Arena]:
        export, private = self._backend.arena, self._backend.private
        self.shared_inputs, self._arm_inputs = export(total_in), export(total_in)
        self.shared_outputs, self._arm_outputs = export(total_out), export(total_out)
        self.private_inputs, self.expected, self.snapshot = private(total_in), private(total_out), private(total_out)
        return self._arm_inputs, self._arm_outputs

    def close(self) -> None:
        """Frees what is private; what workers may map waits for them."""
        _close([self.private_inputs, self.expected, self.snapshot])

    def forget(self) -> None:
        _close([*self._doomed, *self._retired, *self._current])
        self._doomed, self._retired, self._current = [], [], []

    def write_call(self, index: int, inputs: list[Any]) -> dict[str, Any]:
        call = super().write_call(index, inputs)
        for slot in self._in[index]:
            self._arm_inputs.copy_from(self.private_inputs, slot)
        for slot in self._out[index]:
            self._arm_outputs.fill(slot, POISON_BYTE)
        return call

    def collect(self, which: str, calls: int) -> None:
        source = self._arm_outputs if which == "reference" else self.shared_outputs
        target = self.expected if which == "reference" else self.snapshot
        slots: list[Slot] = [slot for call in self._out[:calls] for slot in call]
        for slot in slots:
            target.copy_from(source, slot)
        for slot in slots:
            source.fill(slot, POISON_BYTE)

    def take_snapshot(self, calls: int) -> None:
        """The span's end took it."""


def placement_of(reference: Reference, backend: Backend) -> Placement:
    """The placement that fits a backend."""
    return Placement(reference, backend) if backend.shares_snapshots else CudaPlacement(reference, backend)


def _close(arenas: list[Arena]) -> None:
    for arena in {id(arena): arena for arena in arenas}.values():
        arena.close()
