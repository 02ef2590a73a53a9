"""Fresh secret inputs for every timed call, without the cost of drawing them anew.

A few base draws are mixed by rows, scaled a little and sprinkled with single elements of another draw, by a plan that
follows from a secret and the call's number. Every element changes, so that no address, fingerprint or sampled hash of
an earlier call helps; distributions, structural zeros, symmetry and dtypes stay.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evaluator.reference.domain import InputTrait

FACTOR_LOW = 0.9
"""Values shrink by at most this factor, so that bounded inputs stay within their bounds."""
CANARY_SHARE = 256
"""One element in this many comes from a third place."""


@dataclass(frozen=True)
class FreshPlan:
    """How one call's inputs are made from the bases; `seed` drives the choice of rows and canaries."""

    call: int
    first: int
    second: int
    factor: float
    seed: int


def fresh_plan(secret: int | str, call: int, bases: int) -> FreshPlan:
    """The plan of a call."""
    rng = random.Random(f"{secret}/{call}")
    first = rng.randrange(bases)
    second = (first + rng.randrange(1, bases)) % bases if bases > 1 else first
    return FreshPlan(call, first, second, rng.uniform(FACTOR_LOW, 1.0), rng.getrandbits(62))


def apply_plan(
    plan: FreshPlan,
    bases: Sequence[Sequence[torch.Tensor]],
    traits: Sequence[InputTrait],
    out: Sequence[torch.Tensor],
) -> None:
    """Writes a call's input tensors into `out`; `bases[i]` are the tensors of base draw i, shaped like `out`."""
    if not out:
        return
    generator = torch.Generator(out[0].device).manual_seed(plan.seed)
    first, second = bases[plan.first], bases[plan.second]
    for trait, one, other, target in zip(traits, first, second, out, strict=True):
        target.copy_(one)
        mixes = plan.first != plan.second and not trait.fixed_structure
        if mixes:
            _mix_rows(target, other, generator)
        if trait.perturbable:
            if mixes:
                _sprinkle(target, other, generator)
            target.mul_(plan.factor)


def _mix_rows(target: torch.Tensor, other: torch.Tensor, generator: torch.Generator) -> None:
    if target.dim() < 1 or target.shape[0] < 2:
        return
    rows = (torch.rand(target.shape[0], generator=generator, device=target.device) < 0.5).nonzero().flatten()
    if rows.numel():
        target.index_copy_(0, rows, other.index_select(0, rows))


def _sprinkle(target: torch.Tensor, other: torch.Tensor, generator: torch.Generator) -> None:
    """Single elements of the other draw, one of them from a shifted place, so that rows are new as well."""
    count = max(1, target.numel() // CANARY_SHARE)
    places = torch.randint(target.numel(), (count,), generator=generator, device=target.device)
    sources = torch.randint(target.numel(), (count,), generator=generator, device=target.device)
    flat = target.view(-1) if target.is_contiguous() else None
    if flat is None:
        return
    flat[places] = other.reshape(-1)[sources]
