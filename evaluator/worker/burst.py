"""A burst: K timed calls of one model, and the delivery of their results into an arena. Both arms run this code.

Invariants: results are read natively (captured C functions and raw memory, no Python method of the returned object);
all K results live until the burst has been delivered, unless the rules let a result die at the next call; nothing here
is trusted by the judge: it believes the arena's bytes once the worker is stopped, and its own span.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from evaluator.worker import native
from evaluator.worker.arena import Arena
from evaluator.worker.tree import TensorSpec, UnsupportedLeaf, flatten, unflatten

_now_ns = time.perf_counter_ns
_gc_enable, _gc_disable = gc.enable, gc.disable
_no_grad = torch.no_grad

SPOILED_BYTES = 64
"""Of a result that is dropped."""
MAX_LEAVES = 64
"""Tensors of a result."""
MAX_TEXT = 2000
"""Characters that describe a result's structure."""
MAX_PATH = 200
"""Characters of a tensor's place in it."""

Range = tuple[int, int, str]
"""Start and end address of memory in use, and what it is called."""


class Burst(NamedTuple):
    """What a burst of K calls gave: K results, K + 1 clock readings in ns, and how long a call kept its caller.

    `launch_ns` is the median time until a call returned, where the device works on after it; 0 where it does not.
    """

    results: list[Any]
    stamps: list[int]
    launch_ns: int = 0


def view(arena: Arena, spec: TensorSpec) -> torch.Tensor:
    """The tensor that `spec` names in the arena; raises ValueError when it does not fit in."""
    dtype = native.DTYPES.get(spec.dtype)
    if dtype is None:
        raise ValueError(f"no tensors of {spec.dtype} in an arena")
    extent = native.extent_elements(spec.shape, spec.stride)
    if spec.offset + extent * dtype.itemsize > arena.nbytes:
        raise ValueError("tensor outside its arena")
    if extent == 0:
        return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=arena.device)
    return arena.flat(spec.offset, extent, dtype).as_strided(spec.shape, spec.stride)


def read_calls(arena: Arena, calls: list[dict[str, Any]]) -> list[list[Any]]:
    """The input lists of a burst request: fresh tensor objects over the arena."""
    lists = []
    for call in calls:
        tensors = [view(arena, TensorSpec.from_wire(spec)) for spec in call["specs"]]
        lists.append(unflatten(call["tree"], tensors))
    return lists


def run_burst(model: Any, calls: list[list[Any]]) -> Burst:
    """Calls the model once per input list."""
    results: list[Any] = [None] * len(calls)
    stamps = [0] * (len(calls) + 1)
    _gc_disable()
    try:
        with _no_grad():
            stamps[0] = _now_ns()
            for index, inputs in enumerate(calls):
                results[index] = model(*inputs)
                stamps[index + 1] = _now_ns()
    finally:
        _gc_enable()
    return Burst(results, stamps)


class Delivery:
    """Writes results into the output arena and describes what they are made of."""

    def __init__(
        self, arena: Arena, inputs: Arena | None = None, model: torch.nn.Module | None = None, device: str = "cpu"
    ) -> None:  # fmt: skip
        self._arena = arena
        self._device = device
        self._input = (inputs.start, inputs.start + inputs.nbytes) if inputs else (0, 0)
        self._parameters = native.state_ranges(model) if model is not None else []

    def deliver(self, result: Any, slots: list[list[int]], earlier: list[Range]) -> dict[str, Any]:
        """Copies one call's tensors into its slots and describes them; more than `MAX_LEAVES` are only counted.

        `earlier` are the results that the caller still holds; this call's are added. The answer is untrusted and holds
        `structure`, one row per leaf (the fields of `LeafFacts`) and `aliases`.
        """
        try:
            flat = flatten(result, native.is_tensor)
        except UnsupportedLeaf as error:
            return {"structure": str(error)[:200], "leaves": [], "aliases": []}
        if len(flat.tensors) > MAX_LEAVES:
            return {"structure": f"{len(flat.tensors)} tensors", "leaves": [], "aliases": []}
        leaves: list[dict[str, Any]] = []
        aliases: list[dict[str, str]] = []
        own: list[Range] = []
        for index, (tensor, path) in enumerate(zip(flat.tensors, flat.paths, strict=True)):
            path = path[:MAX_PATH]
            row = native.describe(tensor, path, self._device)
            leaves.append(row)
            if not row["address"]:
                continue
            here = (row["address"], row["address"] + row["span_bytes"], path)
            aliases += self._overlaps(here, earlier, own)
            own.append(here)
            if index < len(slots) and row["span_bytes"] <= slots[index][1]:
                self._arena.put(slots[index][0], row["address"], row["span_bytes"])
        earlier += own
        for row in leaves:
            del row["address"], row["span_bytes"]
        return {"structure": flat.structure[:MAX_TEXT], "leaves": leaves, "aliases": aliases}

    def spoil(self, results: list[Range], kept: Collection[str], fill: Callable[[int, int], None]) -> None:
        """Marks results that their caller drops, in their first bytes.

        They are the caller's, who may write to them; memory that is handed out again unwritten then shows no earlier
        answer. What lies in inputs or parameters is left alone, and so are the paths `kept`.
        """
        foreign = [self._input, *((start, end) for start, end, _ in self._parameters)]
        for start, end, path in results:
            if path not in kept and not any(start < upper and lower < end for lower, upper in foreign):
                fill(start, min(end - start, SPOILED_BYTES))

    def _overlaps(self, here: Range, earlier: list[Range], own: list[Range]) -> list[dict[str, str]]:
        """What the range overlaps.

        Inputs and parameters are given to every call: where they were handed out, that it happened before says nothing.
        """
        found: list[dict[str, str]] = []
        groups: tuple[tuple[str, list[Range]], ...] = (
            ("input", [(*self._input, "")]),
            ("parameter", self._parameters),
            ("earlier_output", earlier),
            ("sibling_output", own),
        )
        for target, ranges in groups:
            if found and target == "earlier_output":
                continue
            for start, end, name in ranges:
                if here[0] < end and start < here[1]:
                    found.append({"target": target, "path": here[2], "other": name})
                    break
        return found
