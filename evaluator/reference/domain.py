"""Which inputs a task has, and how fresh ones are drawn: as given, shifted, scaled, sign-flipped, small integers.

Invariants: integer, bool and mask inputs keep their dtype and are only ever redrawn; zeros that belong to an input's
structure (a triangle, a sparse pattern) stay zero; a kind of draw is admitted only where the reference stays finite at
both ends of its range; a draw follows from its seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from evaluator.judgement.facts import DrawKind
from evaluator.reference.comparison import all_finite
from evaluator.reference.subject import Subject, leaves_of, map_tensors

SHIFTS = (4.0, 1.0)
"""Largest shift tried, then a smaller one, in either direction."""
SCALES = (8.0, 2.0)
EXACT_BITS = 12
STRUCTURAL_ZEROS = 0.01
"""Share of exact zeros above which zeros are taken for structure."""
MASK_VALUES = 2
"""A floating input with at most this many distinct values, or with infinities, is a mask."""

InputKind = Literal["float", "mask", "integer", "bool"]


class InputTrait(BaseModel):
    """What one tensor of the inputs is.

    `fixed_structure` inputs (triangles, symmetric matrices, probabilities, sorted indices) may be scaled where they are
    floating; their elements are never exchanged for those of another draw.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    kind: InputKind
    keeps_zeros: bool = False
    fixed_structure: bool = False

    @property
    def perturbable(self) -> bool:
        return self.kind == "float"


class Domain(BaseModel):
    """The kinds of draw that a task admits, with their ranges."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    traits: tuple[InputTrait, ...] = ()
    kinds: tuple[DrawKind, ...] = ("as_given",)
    shift_low: float = 0.0
    shift_high: float = 0.0
    scale_low: float = 1.0
    scale_high: float = 1.0
    exact_density: float = 0.0
    """Share of the first input's small integers that are not zero; 0 where the task is not linear."""


def traits_of(inputs: Sequence[Any]) -> tuple[InputTrait, ...]:
    """The trait of each tensor of the inputs, in the order of `leaves_of`."""
    return tuple(_trait(path, tensor) for path, tensor in leaves_of(list(inputs)))


def _trait(path: str, tensor: torch.Tensor) -> InputTrait:
    if tensor.dtype is torch.bool:
        return InputTrait(path=path, kind="bool")
    if not tensor.is_floating_point():
        ordered = tensor.dim() == 1 and tensor.numel() > 1 and bool((tensor.diff() >= 0).all())
        return InputTrait(path=path, kind="integer", fixed_structure=ordered)
    if tensor.numel() > MASK_VALUES and _is_mask(tensor):
        return InputTrait(path=path, kind="mask")
    zeros = tensor.numel() > 1 and float((tensor == 0).double().mean()) > STRUCTURAL_ZEROS
    symmetric = tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2] and torch.equal(tensor, tensor.mT)
    return InputTrait(
        path=path, kind="float", keeps_zeros=zeros, fixed_structure=zeros or symmetric or _sums_fixed(tensor)
    )


def _is_mask(tensor: torch.Tensor) -> bool:
    if not all_finite(tensor) and bool(torch.isinf(tensor).any()):
        return True
    sample = tensor.reshape(-1)[:: max(1, tensor.numel() // 65536)]
    return torch.unique(sample).numel() <= MASK_VALUES


def _sums_fixed(tensor: torch.Tensor) -> bool:
    """Whether all rows sum to one, as probabilities do."""
    if tensor.dim() == 0 or tensor.shape[-1] < 2:
        return False
    return bool(((tensor.sum(dim=-1) - 1).abs() < 1e-4).all())


def explore(subject: Subject, seed: int) -> Domain:
    """Tries each kind of draw at both ends of its range; a kind that raises or loses finite values is left out."""
    inputs = subject.draw(seed)
    traits = traits_of(inputs)
    outputs = subject.run(inputs)
    kinds: list[DrawKind] = ["as_given"]
    if not any(trait.perturbable for trait in traits):
        return Domain(traits=traits)

    def stays_finite(shift: float, scale: float) -> bool:
        try:
            changed = subject.run(transformed(inputs, traits, shift=shift, scale=scale))
        except (RuntimeError, ValueError, IndexError):
            return False
        same_shapes = [leaf.shape for _, leaf in changed] == [leaf.shape for _, leaf in outputs]
        return same_shapes and subject.stays_finite(changed, inputs)

    high = next((value for value in SHIFTS if stays_finite(value, 1.0)), 0.0)
    low = next((-value for value in SHIFTS if stays_finite(-value, 1.0)), 0.0)
    large = next((value for value in SCALES if stays_finite(0.0, value)), 1.0)
    small = next((1 / value for value in SCALES if stays_finite(0.0, 1 / value)), 1.0)
    if high - low > 0:
        kinds.append("shifted")
    if large / small > 1:
        kinds.append("scaled")
    if stays_finite(0.0, -1.0):
        kinds.append("flipped")
    return Domain(traits=traits, kinds=tuple(kinds), shift_low=low, shift_high=high, scale_low=small, scale_high=large)


def transformed(
    inputs: Sequence[Any], traits: Sequence[InputTrait], *, shift: float = 0.0, scale: float = 1.0
) -> list[Any]:
    """The inputs with every perturbable tensor `x * scale + shift`, structural zeros left alone; others as they are."""
    order = iter(traits)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        trait = next(order)
        if not trait.perturbable:
            return tensor
        moved = tensor * scale
        if shift:
            moved = torch.where(tensor != 0, moved + shift, moved) if trait.keeps_zeros else moved + shift
        return moved

    return [map_tensors(value, change) for value in inputs]


def draw_inputs(subject: Subject, domain: Domain, kind: DrawKind, seed: int) -> list[Any]:
    """Inputs of a kind under a seed; raises ValueError for a kind that the domain does not admit."""
    if kind not in domain.kinds:
        raise ValueError(f"this task admits no {kind} inputs")
    inputs = subject.draw(seed)
    rng = random.Random(f"{kind}/{seed}")
    if kind == "shifted":
        return transformed(inputs, domain.traits, shift=_away(rng, domain.shift_low, domain.shift_high, 0.0))
    if kind == "scaled":
        return transformed(inputs, domain.traits, scale=rng.choice(_ends(domain)) * rng.uniform(0.75, 1.0))
    if kind == "flipped":
        return transformed(inputs, domain.traits, scale=-1.0)
    if kind == "exact":
        return exact_inputs(inputs, domain.traits, seed, domain.exact_density)
    return inputs


def _ends(domain: Domain) -> list[float]:
    return [end for end in (domain.scale_low * 4 / 3, domain.scale_high) if end != 1.0]


def _away(rng: random.Random, low: float, high: float, from_value: float) -> float:
    """A value of the outer three quarters of a side of [low, high]."""
    ends = [end for end in (low, high) if end != from_value]
    return rng.choice(ends) * rng.uniform(0.25, 1.0)


def exact_inputs(inputs: Sequence[Any], traits: Sequence[InputTrait], seed: int, density: float) -> list[Any]:
    """Integers of 12 bits for the first floating input, that share of them not zero, and of one bit for the others.

    Sums of them do not round. 12 bits are more than TF32 and bfloat16 keep, so that a downgrade shows even where its
    error would average out; longer sums get sparser inputs, not smaller numbers.
    """
    device = next((tensor.device for _, tensor in leaves_of(list(inputs))), torch.device("cpu"))
    generator = torch.Generator(device).manual_seed(seed % (1 << 63))
    order = iter(traits)
    first = True

    def change(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal first
        trait = next(order)
        if not trait.perturbable:
            return tensor
        bound = (1 << EXACT_BITS) - 1 if first else 1
        drawn = torch.randint(-bound, bound + 1, tensor.shape, generator=generator, device=device)
        if first and density < 1:
            drawn *= torch.rand(tensor.shape, generator=generator, device=device) < density
        first = False
        values = drawn.to(tensor.dtype)
        return torch.where(tensor != 0, values, 0) if trait.keeps_zeros else values

    drawn = [map_tensors(value, change) for value in inputs]
    return [_symmetric_again(value, trait) for value, trait in zip(drawn, _top_traits(inputs, traits), strict=True)]


def _top_traits(inputs: Sequence[Any], traits: Sequence[InputTrait]) -> list[InputTrait | None]:
    """The trait of each top-level input that is a tensor."""
    by_path = {trait.path: trait for trait in traits}
    return [by_path.get(str(i)) if isinstance(value, torch.Tensor) else None for i, value in enumerate(inputs)]


def _symmetric_again(value: Any, trait: InputTrait | None) -> Any:
    if trait is None or not trait.fixed_structure or trait.keeps_zeros or value.dim() < 2:
        return value
    return torch.triu(value) + torch.triu(value, 1).mT if value.shape[-1] == value.shape[-2] else value
