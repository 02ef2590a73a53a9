"""The float64 oracle: how much the declared precision's own reference errs, and from that the error budget.

Invariants: runs at task admission only, on a few seeds; the oracle sees exactly the inputs and parameters that the
reference sees, cast up; where the reference cannot run in float64 the budget says so and rests on fixed allowances.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from evaluator.judgement.facts import DrawKind
from evaluator.reference.budget import ALLOWANCES, ErrorBudget, LeafBudget
from evaluator.reference.comparison import TileErrors, tile_errors
from evaluator.reference.domain import Domain, InputTrait, draw_inputs, exact_inputs
from evaluator.reference.parameters import draw_state, usable_state
from evaluator.reference.subject import Leaves, Subject, leaves_of, map_tensors, run_module
from tasks.records.task import Precision

QUANTILE = 0.95
"""Share of tiles whose relative error sets the relative part of a budget; what lies above goes to the absolute part."""
EXACT_DENSITIES = (1.0, 1 / 4, 1 / 16, 1 / 64)
EXACT_LIMIT = float(1 << 24)
"""Integers up to here are exact in float32."""
ASSUMED_EPSILONS = 64.0
"""Allowance in machine epsilons where there is no oracle: a long reduction in plain order."""


class OracleImpossible(RuntimeError):
    """The reference does not run in float64: an operator, a fixed dtype inside forward, or memory."""


@contextlib.contextmanager
def float64_default() -> Iterator[None]:
    """float64 as torch's default dtype, so that tensors made inside forward are float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass
class Oracle:
    """Runs the reference in float64 on the device, or on the CPU where the device cannot hold it."""

    subject: Subject
    limit_bytes: float = math.inf
    """Memory that inputs, parameters and outputs may take in float64."""
    _module: torch.nn.Module | None = field(default=None, repr=False)

    def run(self, inputs: Sequence[Any], state: Mapping[str, torch.Tensor] | None = None) -> Leaves:
        """Float64 outputs for the reference's own inputs; raises OracleImpossible."""
        try:
            if self._module is None:
                self._check_memory(inputs)
                self._module = copy.deepcopy(self.subject.module).double()
            doubled = [map_tensors(value, _up) for value in inputs]
            raised = {name: _up(value) for name, value in state.items()} if state is not None else None
            with float64_default():
                outputs = run_module(self._module, doubled, raised, device=self.subject.device)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, MemoryError) as error:
            raise OracleImpossible(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
        return outputs

    def _check_memory(self, inputs: Sequence[Any]) -> None:
        total = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += 8 * tensor.numel() if tensor.is_floating_point() else tensor.nbytes
            return tensor

        for value in (*inputs, dict(self.subject.module.state_dict())):
            map_tensors(value, count)
        if total > self.limit_bytes:
            raise OracleImpossible(f"float64 inputs and parameters take {total} bytes of {self.limit_bytes:.0f}")


def _up(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def build_budget(
    subject: Subject,
    domain: Domain,
    kind: DrawKind,
    seeds: Sequence[int],
    *,
    precision: Precision = "fp32",
    oracle: Oracle | None = None,
    constructed: bool = False,
) -> ErrorBudget:
    """The budget of one kind of draw from the reference's errors beside the oracle, over the seeds.

    Each seed draws inputs and, unless the parameters are to stay as `constructed`, all parameters.

    Per leaf: the relative part is `multiple` x the 95 % quantile over tiles of (error over the tile's RMS), so that
    few tiles full of cancellation do not excuse all others; what they need goes to the absolute part, in units of the
    leaf's RMS. Both for the RMS and the largest error of a tile; the precision's floor is added.
    """
    if oracle is None:
        oracle = Oracle(subject)
    errors: dict[str, list[TileErrors]] = {}
    exact: dict[str, bool] = {}
    longest = 1
    for seed in seeds:
        inputs = draw_inputs(subject, domain, kind, seed)
        state = None if constructed else _state(subject, kind, seed, inputs)
        outputs = subject.run(inputs, state)
        longest = max(longest, *(max(leaf.shape, default=1) for _, leaf in leaves_of(inputs)), 1)
        exact.update({path: not leaf.is_floating_point() for path, leaf in outputs})
        try:
            truth = dict(oracle.run(inputs, state))
        except OracleImpossible as error:
            return assumed_budget(exact, kind, precision, note=str(error))
        for path, leaf in outputs:
            if exact[path]:
                continue
            if path not in truth or truth[path].shape != leaf.shape:
                return assumed_budget(exact, kind, precision, note=f"output {path} has another shape in float64")
            errors.setdefault(path, []).append(tile_errors(leaf, truth[path]))
    leaves = tuple(
        LeafBudget(path=path, exact=True) if is_exact else _leaf_budget(path, errors[path], precision, longest)
        for path, is_exact in exact.items()
    )
    return ErrorBudget(kind=kind, precision=precision, leaves=leaves)


def _state(subject: Subject, kind: DrawKind, seed: int, inputs: Sequence[Any]) -> dict[str, torch.Tensor] | None:
    """Parameters of an oracle run: random ones, as candidates are given; small integers for exact draws."""
    if kind == "exact":
        return draw_state(subject.module, seed, "exact")
    return usable_state(subject, seed, inputs=inputs) if subject.module.state_dict() else None


def _leaf_budget(path: str, runs: Sequence[TileErrors], precision: Precision, longest: int) -> LeafBudget:
    allowance = ALLOWANCES[precision]
    rms_floor, max_floor = allowance.floors(longest)
    rms_rel, rms_abs = _fit([(run.error_rms, run.tile_rms, run.leaf_rms) for run in runs], allowance.multiple)
    max_rel, max_abs = _fit([(run.error_max, run.tile_rms, run.leaf_rms) for run in runs], allowance.multiple)
    return LeafBudget(
        path=path,
        rms_rel=rms_rel,
        max_rel=max_rel,
        rms_floor=rms_floor,
        max_floor=max_floor,
        rms_abs=rms_abs,
        max_abs=max_abs,
    )


def _fit(runs: Sequence[tuple[torch.Tensor, torch.Tensor, float]], multiple: float) -> tuple[float, float]:
    """Relative and absolute part that cover `multiple` times every tile's error."""
    ratios = torch.cat([(error / tile)[tile > 0] for error, tile, _ in runs])
    relative = multiple * _quantile(ratios, QUANTILE)
    rest = [
        float((multiple * error - relative * tile).clamp_min(0).max()) / leaf for error, tile, leaf in runs if leaf > 0
    ]
    return relative, max(rest, default=0.0)


def _quantile(values: torch.Tensor, share: float) -> float:
    if values.numel() == 0:
        return 0.0
    rank = min(values.numel() - 1, math.ceil(share * values.numel()) - 1)
    return float(values.sort().values[max(0, rank)])


def assumed_budget(exact: Mapping[str, bool], kind: DrawKind, precision: Precision, note: str) -> ErrorBudget:
    """Fixed allowances for a reference that has no oracle."""
    epsilon = ALLOWANCES[precision].epsilon
    scale = ASSUMED_EPSILONS if precision == "fp32" else ALLOWANCES[precision].floor_max
    leaves = tuple(
        LeafBudget(path=path, exact=True)
        if is_exact
        else LeafBudget(path=path, rms_rel=scale * epsilon, max_rel=4 * scale * epsilon)
        for path, is_exact in exact.items()
    )
    return ErrorBudget(kind=kind, precision=precision, leaves=leaves, oracle="assumed", note=note)


def find_exact_density(subject: Subject, domain: Domain, seed: int, oracle: Oracle | None = None) -> float:
    """Density of integer inputs on which the task makes no rounding error in any order of summation; 0 for none.

    The task has to be linear in each floating input (checked on the integers: f(x + y) = f(x) + f(y) - f(0)), to give
    integers, equal in declared and double precision, and to stay below 2^24 with all signs made positive, which bounds
    every partial sum.
    """
    oracle = oracle or Oracle(subject)
    if not any(trait.perturbable for trait in domain.traits):
        return 0.0
    drawn = subject.draw(seed)
    state = draw_state(subject.module, seed, "exact")
    try:
        for density in EXACT_DENSITIES:
            inputs = exact_inputs(drawn, domain.traits, seed, density)
            truth = oracle.run(inputs, state)
            if not _are_integers(truth):
                return 0.0
            if _rounds_nothing(subject, oracle, inputs, state, truth):
                return density if _is_linear(oracle, inputs, drawn, domain.traits, state, seed, density) else 0.0
    except OracleImpossible:
        return 0.0
    return 0.0


def _are_integers(truth: Leaves) -> bool:
    """Whether exact outputs are floating integers, not all zero: no other density can change that."""
    floating = all(leaf.is_floating_point() and torch.equal(leaf, leaf.round()) for _, leaf in truth)
    return floating and any(bool((leaf != 0).any()) for _, leaf in truth)


def _rounds_nothing(
    subject: Subject, oracle: Oracle, inputs: Sequence[Any], state: Mapping[str, torch.Tensor], truth: Leaves
) -> bool:
    """Whether the declared precision gives the exact outputs, and every partial sum is small enough to be exact."""
    outputs = subject.run(inputs, state)
    for (_, leaf), (_, true) in zip(outputs, truth, strict=True):
        if not leaf.is_floating_point() or leaf.shape != true.shape or not torch.equal(leaf.double(), true):
            return False
    positive_state = {name: _positive(value) for name, value in state.items()}
    positive = oracle.run([map_tensors(value, _positive) for value in inputs], positive_state)
    return all(bool((leaf.abs() < EXACT_LIMIT).all()) for _, leaf in positive)


def _positive(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs() if tensor.is_floating_point() else tensor


def _is_linear(
    oracle: Oracle,
    first: Sequence[Any],
    drawn: Sequence[Any],
    traits: Sequence[InputTrait],
    state: Mapping[str, torch.Tensor],
    seed: int,
    density: float,
) -> bool:
    """Additive (up to a constant) in each floating input with the others held."""
    second = exact_inputs(drawn, traits, seed + 1, density)
    for trait in traits:
        if not trait.perturbable:
            continue
        variants = [_combine(first, second, traits, trait.path, a, b) for a, b in ((1, 1), (1, 0), (0, 1), (0, 0))]
        both, one, other, none = (oracle.run(variant, state) for variant in variants)
        for (_, f_both), (_, f_one), (_, f_other), (_, f_none) in zip(both, one, other, none, strict=True):
            if not torch.equal(f_both + f_none, f_one + f_other):
                return False
    return True


def _combine(
    first: Sequence[Any], second: Sequence[Any], traits: Sequence[InputTrait], path: str, a: int, b: int
) -> list[Any]:
    """The first inputs with the tensor at `path` replaced by a x first + b x second."""
    order = iter(traits)
    others = iter([tensor for _, tensor in leaves_of(list(second))])

    def change(tensor: torch.Tensor) -> torch.Tensor:
        other = next(others)
        return a * tensor + b * other if next(order).path == path else tensor

    return [map_tensors(value, change) for value in first]
