"""Answers that must not pass: zeros, the mean, another call's output, shuffled rows, a lower precision.

Invariant: an adversary that equals the right answer bit for bit says nothing and is left out (None).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evaluator.reference.budget import ErrorBudget
from evaluator.reference.comparison import compare_leaf, same_bits, tile_errors
from evaluator.reference.subject import Leaves, Subject, map_tensors
from tasks.records.task import Precision

CONSTANT_LIKE = ("zeros", "mean", "previous_output", "shuffled_rows")
"""Adversaries whose success shows that a task's output hardly depends on its input."""
LOWER_PRECISION = "lower_precision"
_KEPT_BITS: dict[Precision, int] = {"fp32": 10, "fp16": 3, "bf16": 3}
"""Mantissa bits of the next lower arithmetic: TF32 and fp16 below fp32, fp8 below the halves."""


def adversaries(outputs: Leaves, previous: Leaves, lower: Leaves | None) -> dict[str, Leaves]:
    """The adversaries of one right answer. `previous` answers other inputs; `lower` came by a lower precision."""
    found = {
        "zeros": [(path, torch.zeros_like(leaf)) for path, leaf in outputs],
        "mean": [(path, _mean(leaf)) for path, leaf in outputs],
        "previous_output": previous,
        "shuffled_rows": [(path, _shuffled(leaf)) for path, leaf in outputs],
    }
    if lower is not None:
        found[LOWER_PRECISION] = lower
    return found


def passes(answer: Leaves, outputs: Leaves, budget: ErrorBudget) -> bool | None:
    """Whether a wrong answer is within budget; None where it is the right answer itself, or has another shape."""
    if [leaf.shape for _, leaf in answer] != [leaf.shape for _, leaf in outputs] or same_bits(answer, outputs):
        return None
    wanted = dict(outputs)
    return not any(compare_leaf(leaf, wanted[path], budget.leaf(path)).wrong for path, leaf in answer)


def _mean(leaf: torch.Tensor) -> torch.Tensor:
    if leaf.numel() == 0 or leaf.dtype is torch.bool:
        return leaf.clone()
    return torch.full_like(leaf, leaf.double().mean().item() if leaf.is_floating_point() else int(leaf.double().mean()))


def _shuffled(leaf: torch.Tensor) -> torch.Tensor:
    if leaf.dim() == 0:
        return leaf.clone()
    if leaf.shape[0] > 1:
        return leaf.roll(1, 0)
    return leaf.reshape(-1).roll(1).reshape(leaf.shape)


def rounded(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """A floating tensor rounded to that many explicit mantissa bits, its exponent range kept; others as they are."""
    if not tensor.is_floating_point():
        return tensor
    drop = 23 - bits
    whole = tensor.float().contiguous().view(torch.int32)
    cut = ((whole + (1 << (drop - 1))) >> drop) << drop
    result = torch.where(torch.isfinite(tensor.float()), cut.view(torch.float32), tensor.float())
    return result.to(tensor.dtype)


def lower_precision(
    subject: Subject, inputs: Sequence[Any], precision: Precision, state: Mapping[str, torch.Tensor] | None = None
) -> Leaves:
    """The reference's output when inputs and parameters keep only the mantissa of the next lower arithmetic."""
    return _with_bits(subject, inputs, _KEPT_BITS[precision], state)


def _with_bits(
    subject: Subject, inputs: Sequence[Any], bits: int, state: Mapping[str, torch.Tensor] | None = None
) -> Leaves:
    whole = subject.module.state_dict() if state is None else state
    fewer = {name: rounded(value, bits) for name, value in whole.items()}
    return subject.run([map_tensors(value, lambda tensor: rounded(tensor, bits)) for value in inputs], fewer)


def half_errors(
    subject: Subject, inputs: Sequence[Any], precision: Precision, state: Mapping[str, torch.Tensor] | None = None
) -> dict[str, float]:
    """Per leaf, the largest RMS error of a tile over the tile's RMS when the task runs in half precision.

    The larger of a run in bfloat16, where the operators have one, and of the reference on values rounded to bfloat16.
    """
    worst: dict[str, float] = {}
    wanted = dict(subject.run(inputs, state))
    bits = 7 if precision == "fp32" else 2
    for answer in (_with_bits(subject, inputs, bits, state), _in_bfloat16(subject, inputs, state)):
        for path, leaf in answer or []:
            if path in wanted and leaf.shape == wanted[path].shape and wanted[path].is_floating_point():
                seen = tile_errors(wanted[path], leaf)
                ratios = (seen.error_rms / seen.tile_rms)[seen.tile_rms > 0]
                largest = float(ratios.max()) if ratios.numel() else 0.0
                worst[path] = max(worst.get(path, 0.0), largest if largest < 1 else 1.0)
    return worst


def _in_bfloat16(subject: Subject, inputs: Sequence[Any], state: Mapping[str, torch.Tensor] | None) -> Leaves | None:
    def down(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16() if tensor.is_floating_point() else tensor

    try:
        half = Subject(copy.deepcopy(subject.module).bfloat16(), subject.make_inputs, subject.device)
        lowered = None if state is None else {name: down(value) for name, value in state.items()}
        outputs = half.run([map_tensors(value, down) for value in inputs], lowered)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    return [(path, leaf.float() if leaf.is_floating_point() else leaf) for path, leaf in outputs]


def poisoned(inputs: Sequence[Any]) -> list[Any]:
    """Inputs with a NaN in each first-dimension entry of every floating tensor."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return tensor
        changed = tensor.clone(memory_format=torch.contiguous_format)
        changed.view(changed.shape[0] if changed.dim() else 1, -1)[:, 0] = float("nan")
        return changed

    return [map_tensors(value, change) for value in inputs]
