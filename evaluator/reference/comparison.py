"""Compares an output with the reference's on the same input, tile by tile, under an error budget.

Invariants: nothing of the candidate's process is used but bytes; no temporary is as large as the output; NaN never
passes, since every test has the form `not (error <= allowed)`; the worst tile decides, not the average.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evaluator.judgement.facts import Aspect, CallResult
from evaluator.reference.budget import ErrorBudget, LeafBudget
from evaluator.reference.tiles import Chunk, chunks
from tasks.figures import figures
from tasks.records.evaluation import Step

LOOSE = 1e-2
"""Absolute and relative tolerance of the `paper` rules (CUDA-L1's released evaluator)."""
HALF_MARGIN = 2.0
"""An error up to this multiple of the half-precision path's own counts as a lost precision, not as a wrong formula."""
QUICK = 0.999
"""The quick path leaves this margin for its own rounding."""
QUICK_LARGEST = 1e15
"""Larger tiles are looked at in double precision: their squares come near the end of float32's range."""
UNBOUNDED = 1e30
"""Stands for an infinite ratio, since records hold no infinities."""

Leaves = Sequence[tuple[str, torch.Tensor]]
"""A flattened output: paths and tensors."""


@dataclass
class LeafComparison:
    """How one tensor compares; see `CallResult` for the meaning of the shared fields."""

    path: str
    masks_differ: bool = False
    over_budget: bool = False
    bit_equal: bool = True
    worst_ratio: float = 0.0
    half_like: bool = True
    """No tile is further off than the half-precision path explains; meaningful when over budget."""
    flat_index: int | None = None
    shape: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0
    allowed: float = 0.0

    @property
    def wrong(self) -> bool:
        return self.masks_differ or self.over_budget

    @property
    def index(self) -> tuple[int, ...]:
        """The first wrong element's index; empty for a right leaf or a scalar."""
        if self.flat_index is None:
            return ()
        rest, index = self.flat_index, []
        for length in reversed(self.shape):
            index.append(rest % length)
            rest //= length
        return tuple(reversed(index))


def compare_leaf(output: torch.Tensor, expected: torch.Tensor, budget: LeafBudget) -> LeafComparison:
    """Compares two tensors of one shape; raises ValueError for different shapes (an earlier defence's affair)."""
    if output.shape != expected.shape:
        raise ValueError(f"shapes {tuple(output.shape)} and {tuple(expected.shape)} cannot be compared")
    result = LeafComparison(path=budget.path, shape=tuple(expected.shape))
    leaf_rms = rms(expected) if budget.rms_abs or budget.max_abs else 0.0
    for chunk in chunks(output, expected):
        got, wanted = chunk.parts
        if got.dtype == wanted.dtype and torch.equal(got, wanted):
            continue
        result.bit_equal = False
        if budget.exact or not wanted.is_floating_point():
            _compare_exact(result, chunk)
        elif not _surely_within(result, chunk, budget):
            _compare_tiles(result, chunk, budget, leaf_rms)
    return result


def _surely_within(result: LeafComparison, chunk: Chunk, budget: LeafBudget) -> bool:
    """The quick path of right outputs, in their own precision: True only when no closer look could find a fault.

    Any NaN, Inf or overflow makes a comparison false; underflow can only shrink what the largest error is allowed.
    """
    got, wanted = chunk.parts
    if got.dtype != torch.float32 or wanted.dtype != torch.float32:
        return False
    error = got - wanted
    tile_rms = torch.linalg.vector_norm(wanted, dim=1).double() / chunk.counts.sqrt()
    error_rms = torch.linalg.vector_norm(error, dim=1).double() / chunk.counts.sqrt()
    error_max = error.abs_().amax(dim=1).double()
    allowed_rms = (budget.rms_rel + budget.rms_floor) * tile_rms
    allowed_max = (budget.max_rel + budget.max_floor) * tile_rms
    within = (error_rms <= QUICK * allowed_rms) & (error_max <= QUICK * allowed_max)
    if not bool((within & (tile_rms < QUICK_LARGEST)).all()):
        return False
    worst = torch.maximum(_ratio(error_rms, allowed_rms), _ratio(error_max, allowed_max))
    result.worst_ratio = max(result.worst_ratio, float(worst.max()))
    return True


def _compare_exact(result: LeafComparison, chunk: Chunk) -> None:
    got, wanted = chunk.parts
    different = ~(got == wanted) & ~((got != got) & (wanted != wanted))
    if different.any():
        result.over_budget, result.half_like, result.worst_ratio = True, False, UNBOUNDED
        _note_first(result, chunk, different.flatten(), 0.0)


def _compare_tiles(result: LeafComparison, chunk: Chunk, budget: LeafBudget, leaf_rms: float) -> None:
    got, wanted = chunk.parts[0].double(), chunk.parts[1].double()
    if not (all_finite(got) and all_finite(wanted)):
        finite = torch.isfinite(got) & torch.isfinite(wanted)
        same = finite | (got == wanted) | (torch.isnan(got) & torch.isnan(wanted))
        if not bool(same.all()):
            result.masks_differ, result.half_like = True, False
            _note_first(result, chunk, ~same.flatten(), 0.0)
        got, wanted = torch.where(finite, got, 0.0), torch.where(finite, wanted, 0.0)
    error = (got - wanted).abs_()
    tile_rms = _tile_rms(wanted, chunk.counts)
    error_rms, error_max = _tile_rms(error, chunk.counts), error.amax(dim=1)
    entry_rms = chunk.entry_rms(tile_rms)
    allowed_rms = budget.rms_rel * tile_rms + budget.rms_floor * entry_rms + budget.rms_abs * leaf_rms
    allowed_max = budget.max_rel * tile_rms + budget.max_floor * entry_rms + budget.max_abs * leaf_rms
    worst = torch.maximum(_ratio(error_rms, allowed_rms), _ratio(error_max, allowed_max)).max().item()
    result.worst_ratio = max(result.worst_ratio, min(worst, UNBOUNDED))
    within = (error_rms <= allowed_rms) & (error_max <= allowed_max)
    if bool(within.all()):
        return
    over = ~within
    explained = HALF_MARGIN * budget.half_rms_rel * tile_rms + allowed_rms
    result.half_like = result.half_like and bool((error_rms[over] <= explained[over]).all())
    if not result.over_budget:
        result.over_budget = True
        tile = int(over.to(torch.int8).argmax())
        elements = ~(error[tile] <= allowed_max[tile])
        position = int(elements.to(torch.int8).argmax()) if bool(elements.any()) else int(error[tile].argmax())
        if result.flat_index is None:
            limit = allowed_max[tile] if bool(elements.any()) else allowed_rms[tile]
            _note(result, chunk, tile, position, float(limit))


def _tile_rms(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Root mean square of each tile; scaled by the largest element so that huge values do not overflow."""
    scale = values.abs().amax(dim=1).clamp_min(1e-300)
    return scale * ((values / scale[:, None]).square_().sum(dim=1) / counts).sqrt_()


def _ratio(error: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    return torch.where(error == 0, 0.0, error / allowed.clamp_min(1e-300))


def _note_first(result: LeafComparison, chunk: Chunk, wrong: torch.Tensor, allowed: float) -> None:
    if result.flat_index is None:
        first = int(wrong.to(torch.int8).argmax())
        width = chunk.parts[0].shape[1]
        _note(result, chunk, first // width, first % width, allowed)


def _note(result: LeafComparison, chunk: Chunk, tile: int, position: int, allowed: float) -> None:
    result.flat_index = chunk.flat_index(tile, position)
    result.got = float(chunk.parts[0][tile, position])
    result.expected = float(chunk.parts[1][tile, position])
    result.allowed = allowed


def all_finite(values: torch.Tensor) -> bool:
    """Whether every element is finite: by the sum where that is finite, which is much cheaper, else one by one."""
    if not values.is_floating_point() or bool(torch.isfinite(values.sum())):
        return True
    return bool(torch.isfinite(values).all())


SAMPLED_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class TileErrors:
    """Errors of tiles of one leaf: RMS and largest, the RMS of the reference's own values, and that of all of them."""

    error_rms: torch.Tensor
    error_max: torch.Tensor
    tile_rms: torch.Tensor
    leaf_rms: float


def tile_errors(output: torch.Tensor, truth: torch.Tensor) -> TileErrors:
    """Errors of an output beside a truth, in units that `compare_leaf` uses: the sizes are the output's own.

    Of a leaf with many elements every n-th chunk is looked at. Elements that are not finite on both sides are left out.
    """
    every = max(1, -(-output.numel() // SAMPLED_ELEMENTS))
    limit = max(1, min(output.numel(), SAMPLED_ELEMENTS) // 16)
    columns: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    squares, count = 0.0, 0.0
    for number, chunk in enumerate(chunks(output, truth, limit=limit)):
        if number % every:
            continue
        got, wanted = chunk.parts[0].double(), chunk.parts[1].double()
        error = got - wanted
        if not all_finite(error):
            error, got = torch.where(torch.isfinite(error), error, 0.0), torch.where(torch.isfinite(error), got, 0.0)
        size = _tile_rms(got, chunk.counts)
        columns.append((_tile_rms(error, chunk.counts).cpu(), error.abs().amax(dim=1).cpu(), size.cpu()))
        squares += float((size.square() * chunk.counts).sum())
        count += float(chunk.counts.sum())
    if not columns:
        nothing = torch.zeros(0, dtype=torch.float64)
        return TileErrors(nothing, nothing, nothing, 0.0)
    errors, largest, sizes = (torch.cat(column) for column in zip(*columns, strict=True))
    return TileErrors(errors, largest, sizes, math.sqrt(squares / count))


def rms(values: torch.Tensor) -> float:
    """Root mean square of the finite elements of a whole tensor, in chunks; 0 for an empty one."""
    total, count = 0.0, 0
    for chunk in chunks(values):
        part = chunk.parts[0].double()
        if not all_finite(part):
            part = torch.where(torch.isfinite(part), part, 0.0)
        total += float(_tile_rms(part, chunk.counts).square().mul_(chunk.counts).sum())
        count += int(chunk.counts.sum())
    return math.sqrt(total / count) if count else 0.0


def within_loose(output: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all elements lie within 1e-2 absolute plus 1e-2 relative, NaN and Inf at the same places."""
    for chunk in chunks(output, expected):
        got, wanted = chunk.parts[0].double(), chunk.parts[1].double()
        equal = (got == wanted) | (torch.isnan(got) & torch.isnan(wanted))
        if not bool((equal | ((got - wanted).abs() <= LOOSE + LOOSE * wanted.abs())).all()):
            return False
    return True


def holds_pattern(output: torch.Tensor, pattern: int) -> bool:
    """Whether any element's bits are the evaluator's poison pattern (as an unsigned integer of the element's size)."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(output.element_size())
    if kind is None or output.dtype is torch.bool:
        return False
    bits = 8 * output.element_size()
    signed = pattern - (1 << bits) if pattern >> (bits - 1) & 1 else pattern
    return any(bool((chunk.parts[0] == signed).any()) for chunk in chunks(output.view(kind)))


def same_bits(first: Leaves, second: Leaves) -> bool:
    """Whether two outputs are equal byte for byte; NaNs are equal when their bits are."""
    if [path for path, _ in first] != [path for path, _ in second]:
        return False
    return all(_same_bits(one, other) for (_, one), (_, other) in zip(first, second, strict=True))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    pairs = (chunk.parts for chunk in chunks(one, other))
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)


def compare_call(
    outputs: Leaves,
    expected: Leaves,
    budget: ErrorBudget,
    *,
    earlier: Iterable[Leaves] = (),
    pattern: int | None = None,
    step: Step = "check",
    reloaded: bool = False,
    seed: int | None = None,
    call: int = 0,
) -> CallResult:
    """Compares one call's outputs with the reference's on the same input.

    `earlier` are right answers of earlier calls (other inputs, or the parameters before their change); they are
    looked at only when the output is wrong, to tell a replay from an error. `pattern` is the poison that memory held
    before the call. Outputs whose shapes differ from the expected ones raise ValueError.
    """
    wanted = dict(expected)
    leaves = [compare_leaf(tensor, wanted[path], budget.leaf(path)) for path, tensor in outputs]
    wrong = [leaf for leaf in leaves if leaf.wrong]
    common: dict[str, Any] = {"kind": budget.kind, "step": step, "reloaded": reloaded, "seed": seed, "call": call}
    worst = max((leaf.worst_ratio for leaf in leaves), default=0.0)
    if not wrong:
        return CallResult(**common, bit_equal=all(leaf.bit_equal for leaf in leaves), worst_ratio=worst)
    tensors = dict(outputs)
    unwritten = pattern is not None and any(holds_pattern(tensors[leaf.path], pattern) for leaf in wrong)
    return CallResult(
        **common,
        aspects=_aspects(wrong, unwritten, not unwritten and _is_replay(outputs, expected, budget, earlier)),
        half_like=all(leaf.over_budget and not leaf.masks_differ and leaf.half_like for leaf in wrong),
        loose_ok=all(within_loose(tensors[leaf.path], wanted[leaf.path]) for leaf in wrong),
        worst_ratio=worst,
        **_place(wrong[0]),
    )


def _aspects(wrong: Sequence[LeafComparison], unwritten: bool, replay: bool) -> tuple[Aspect, ...]:
    if unwritten:
        return ("unwritten",)
    if replay:
        return ("stale",)
    masks = any(leaf.masks_differ for leaf in wrong)
    over = any(leaf.over_budget for leaf in wrong)
    return (*(("masks",) if masks else ()), *(("budget",) if over else ()))


def _is_replay(outputs: Leaves, expected: Leaves, budget: ErrorBudget, earlier: Iterable[Leaves]) -> bool:
    """Whether the outputs are right for an earlier call while that call's answer is wrong here."""
    for answer in earlier:
        shapes = [tuple(tensor.shape) for _, tensor in answer]
        if shapes != [tuple(tensor.shape) for _, tensor in outputs]:
            continue
        if _all_right(outputs, answer, budget) and not _all_right(answer, expected, budget):
            return True
    return False


def _all_right(outputs: Leaves, expected: Leaves, budget: ErrorBudget) -> bool:
    wanted = dict(expected)
    return not any(compare_leaf(tensor, wanted[path], budget.leaf(path)).wrong for path, tensor in outputs)


def _place(leaf: LeafComparison) -> dict[str, Any]:
    error = abs(leaf.got - leaf.expected)
    return {
        "leaf": leaf.path,
        "index": leaf.index,
        "got": f"{leaf.got:.9g}",
        "expected": f"{leaf.expected:.9g}",
        "error": figures(error),
        "allowed": figures(leaf.allowed),
    }
