"""One placement: the arenas of both arms, where each call's tensors lie in them, poison and guard bands.

Invariants: the candidate maps only its input copies, its output slots and its copy of the parameters; the reference arm
maps arenas of the same layout, whose bytes are the server's own inputs and the expected results; the snapshot that is
judged is mapped by the server alone.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from evaluator.reference.comparison import Leaves
from evaluator.reference.reference import Reference
from evaluator.worker import burst, native
from evaluator.worker.arena import GUARD_BYTES, Arena, Slot, layout
from evaluator.worker.backend import POISON_BYTE, Backend
from evaluator.worker.tree import TensorSpec, flatten


class Placement:
    """Arenas and layout; `make` replaces them all. `drop` says that workers must give earlier arenas up."""

    def __init__(self, reference: Reference, backend: Backend) -> None:
        self._reference = reference
        self._backend = backend
        self.drop = False
        self.shared_inputs = self.private_inputs = self.shared_outputs = Arena.create(0)
        self.expected = self.snapshot = self.parameters = self.private_parameters = self.shared_inputs
        self._guard = b""
        self._in: list[list[Slot]] = []
        self._out: list[list[Slot]] = []
        self._state: dict[str, Slot] = {}
        self.argument_specs: list[Any] = []

    @property
    def bytes_per_call(self) -> int:
        """Inputs and outputs of one call."""
        return sum(self._reference.input_bytes) + sum(self._reference.output_bytes)

    def make(self, count: int, rng: random.Random) -> list[Arena]:
        """New arenas for `count` calls.

        Returns those that the workers map, inputs, outputs and parameters: first the candidate's, then the reference
        arm's.
        """
        self.close()
        self._guard = rng.randbytes(GUARD_BYTES)
        self._in, total_in = _per_call(self._reference.input_bytes, count, rng)
        self._out, total_out = _per_call(self._reference.output_bytes, count, rng)
        given = self._allocate(total_in, total_out)
        self._place_state(rng)
        for arena, calls in ((self.shared_inputs, self._in), (self.shared_outputs, self._out)):
            for slot in (slot for call in calls for slot in call):
                self._write_guards(arena, slot)
        candidate = (self.shared_inputs, self.shared_outputs, self.parameters)
        return [*candidate, *given, self.private_parameters]

    def _allocate(self, total_in: int, total_out: int) -> tuple[Arena, Arena]:
        """Inputs and outputs; returns the reference arm's."""
        create = self._backend.arena
        self.shared_inputs, self.private_inputs = create(total_in), create(total_in)
        self.shared_outputs, self.expected = create(total_out), create(total_out)
        self.snapshot = self._backend.private(total_out)
        return self.private_inputs, self.expected

    def close(self) -> None:
        """Gives all arenas up."""
        arenas = (self.shared_inputs, self.private_inputs, self.shared_outputs, self.expected, self.snapshot)
        for arena in {id(arena): arena for arena in (*arenas, self.parameters, self.private_parameters)}.values():
            arena.close()

    def forget(self) -> None:
        """No worker is left that maps anything."""

    def _place_state(self, rng: random.Random) -> None:
        state = self._reference.state()
        arguments = flatten(self._reference.arguments, native.is_tensor).tensors
        slots, total = layout([native.nbytes_of(tensor) for tensor in (*state.values(), *arguments)], rng)
        self.parameters, self.private_parameters = self._backend.arena(total), self._backend.arena(total)
        self._state = dict(zip(state, slots, strict=False))
        self.argument_specs = [
            self._write_both(tensor, slot) for tensor, slot in zip(arguments, slots[len(state) :], strict=True)
        ]

    def write_state(self, state: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Copies parameters and buffers into their arena; returns their specs by name."""
        return {name: self._write_both(value, self._state[name]) for name, value in state.items()}

    def state_differs(self, name: str) -> bool:
        """Whether an entry of the state that both sides have written differs beyond rounding."""
        spec = native.spec_of(self._reference.state()[name], self._state[name].offset)
        given, right = burst.view(self.parameters, spec), burst.view(self.private_parameters, spec)
        if not right.is_floating_point():
            return not torch.equal(given, right)
        scale = right.double().square().mean().sqrt().item()
        return not torch.allclose(given.double(), right.double(), rtol=1e-4, atol=1e-5 * scale, equal_nan=True)

    def write_call(self, index: int, inputs: list[Any]) -> dict[str, Any]:
        """Puts one call's inputs into both input arenas and poisons its output slots; returns the call's wire form."""
        flat = flatten(inputs, native.is_tensor)
        specs = []
        for tensor, slot in zip(flat.tensors, self._in[index], strict=True):
            self._write(self.private_inputs, tensor, slot)
            specs.append(self._write(self.shared_inputs, tensor, slot))
        for arena in (self.shared_outputs, self.expected):
            for slot in self._out[index]:
                arena.fill(slot, POISON_BYTE)
        return {"tree": flat.form, "specs": specs, "slots": [[slot.offset, slot.nbytes] for slot in self._out[index]]}

    def _write_both(self, tensor: torch.Tensor, slot: Slot) -> list[Any]:
        self._write(self.private_parameters, tensor, slot)
        return self._write(self.parameters, tensor, slot)

    def _write(self, arena: Arena, tensor: torch.Tensor, slot: Slot) -> list[Any]:
        spec = native.spec_of(tensor, slot.offset)
        burst.view(arena, spec).copy_(tensor)
        return spec.to_wire()

    def fits(self, index: int, rows: list[dict[str, Any]]) -> bool:
        """Whether a call's slots are large enough for what the rows describe."""
        for row, slot in zip(rows, self._out[index], strict=True):
            extent = native.extent_elements(tuple(row["shape"]), tuple(row["stride"]))
            if extent * native.DTYPES[row["dtype"]].itemsize > slot.nbytes:
                return False
        return True

    def leaves(self, arena: Arena, index: int, rows: list[dict[str, Any]]) -> Leaves:
        """Tensors over one call's output slots in `arena`, as the rows describe them."""
        found = []
        for row, slot in zip(rows, self._out[index], strict=True):
            spec = TensorSpec(row["dtype"], tuple(row["shape"]), tuple(row["stride"]), slot.offset)
            found.append((row["path"], burst.view(arena, spec)))
        return found

    def take_snapshot(self, calls: int) -> None:
        """Copies the candidate's results of the first calls into private memory."""
        for slot in (slot for call in self._out[:calls] for slot in call):
            self.snapshot.copy_from(self.shared_outputs, slot)

    def collect(self, which: str, calls: int) -> None:
        """Takes an arm's results away inside its span, where a stopped worker's device may work on."""

    def changed_results(self, calls: int) -> int:
        """Calls whose result differs from the snapshot."""
        return sum(self.shared_outputs.differs(self.snapshot, call) for call in self._out[:calls])

    def changed_inputs(self, calls: int) -> list[str]:
        """Inputs whose shared copy differs from the server's own, by position."""
        changed = set()
        for call in self._in[:calls]:
            for position, slot in enumerate(call):
                if self.shared_inputs.differs(self.private_inputs, [slot]):
                    changed.add(str(position))
        return sorted(changed)

    def poison_pattern(self, expected: Leaves) -> int:
        """The poison as an unsigned integer of the first result's element size."""
        return (1 << (8 * expected[0][1].element_size())) - 1 if expected else 0

    def broken_guards(self) -> list[str]:
        """Guard bands whose pattern changed."""
        broken = []
        for name, arena, calls in (
            ("input", self.shared_inputs, self._in), ("output", self.shared_outputs, self._out),
        ):  # fmt: skip
            places = [(f"{name} slot {i}", slot) for i, call in enumerate(calls) for slot in call]
            before = [slot.offset - GUARD_BYTES for _, slot in places]
            behind = [slot.offset + slot.nbytes for _, slot in places]
            broken += [f"{places[i][0]} before" for i in arena.unlike(before, self._guard)]
            broken += [f"{places[i][0]} behind" for i in arena.unlike(behind, self._guard)]
        return broken

    def _write_guards(self, arena: Arena, slot: Slot) -> None:
        arena.write(slot.offset - GUARD_BYTES, self._guard)
        arena.write(slot.offset + slot.nbytes, self._guard)


def _per_call(sizes: list[int], count: int, rng: random.Random) -> tuple[list[list[Slot]], int]:
    slots, total = layout(sizes * count, rng)
    return [slots[i * len(sizes) : (i + 1) * len(sizes)] for i in range(count)], total
