"""Fresh inputs for timed calls: every element new, distribution and structure kept, secret."""

from __future__ import annotations

import torch

from evaluator.reference.domain import traits_of
from evaluator.reference.fresh import FACTOR_LOW, apply_plan, fresh_plan


def made(bases: list[list[torch.Tensor]], secret: int, call: int) -> list[torch.Tensor]:
    out = [torch.empty_like(tensor) for tensor in bases[0]]
    apply_plan(fresh_plan(secret, call, len(bases)), bases, traits_of(bases[0]), out)
    return out


def test_every_element_differs_between_calls() -> None:
    """Thirty calls, each against each: hardly an element in common (chance meetings of float32 values apart)."""
    bases = [[torch.randn(64, 256)] for _ in range(4)]
    calls = [made(bases, 9, call)[0] for call in range(30)]
    for first in range(30):
        for second in range(first):
            assert float((calls[first] == calls[second]).double().mean()) < 1e-3


def test_a_sampled_fingerprint_of_an_earlier_call_never_comes_again() -> None:
    bases = [[torch.randn(64, 256)] for _ in range(4)]
    seen = {tuple(made(bases, 9, call)[0].view(-1)[::500].tolist()) for call in range(200)}
    assert len(seen) == 200


def test_values_of_uniform_inputs_stay_in_their_interval() -> None:
    bases = [[torch.rand(64, 256)] for _ in range(4)]
    for call in range(10):
        values = made(bases, 1, call)[0]
        assert float(values.min()) >= 0
        assert 0.8 * FACTOR_LOW < float(values.max()) < 1
        assert abs(float(values.mean()) - 0.475) < 0.05


def test_structure_stays() -> None:
    bases = [[torch.rand(64, 64).tril(), (lambda a: a + a.T)(torch.rand(64, 64))] for _ in range(4)]
    for call in range(5):
        triangle, symmetric = made(bases, 1, call)
        assert torch.equal(triangle, triangle.tril())
        assert torch.equal(symmetric, symmetric.T)
    assert not torch.equal(made(bases, 1, 0)[0], made(bases, 1, 1)[0])


def test_integers_and_masks_are_mixed_from_draws_and_never_altered() -> None:
    bases = [[torch.randint(0, 9, (64, 4)), torch.rand(64, 4) > 0.5] for _ in range(4)]
    for call in range(10):
        indices, mask = made(bases, 1, call)
        assert indices.dtype == torch.int64
        assert 0 <= int(indices.min()) <= int(indices.max()) < 9
        assert mask.dtype == torch.bool
    kinds = {tuple(made(bases, 1, call)[0].flatten().tolist()) for call in range(30)}
    assert len(kinds) == 30


def test_the_plan_follows_from_secret_and_call() -> None:
    assert fresh_plan(1, 2, 4) == fresh_plan(1, 2, 4)
    assert fresh_plan(1, 2, 4) != fresh_plan(1, 3, 4)
    assert fresh_plan(1, 2, 4) != fresh_plan(2, 2, 4)
    assert len({fresh_plan(1, call, 4).factor for call in range(100)}) == 100


def test_strided_targets_are_written() -> None:
    bases = [[torch.randn(16, 8).T] for _ in range(3)]
    out = [torch.empty(16, 8).T]
    apply_plan(fresh_plan(3, 1, 3), bases, traits_of(bases[0]), out)
    assert bool(torch.isfinite(out[0]).all())
