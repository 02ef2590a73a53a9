"""Fresh inputs for timed calls: every element new, distribution and structure kept, nothing shared between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from evaluator.reference.domain import Domain, traits_of
from evaluator.reference.fresh import FACTOR_LOW, timed_inputs
from evaluator.reference.subject import Subject
from evaluator.worker import native
from evaluator.worker.tree import flatten


def maker(make: Callable[[], list[Any]]) -> Callable[[int], list[torch.Tensor]]:
    """Inputs of a timed call by its seed."""
    subject = Subject(torch.nn.Identity(), make)
    domain = Domain(traits=traits_of(flatten(make(), native.is_tensor).tensors))
    return lambda seed: flatten(timed_inputs(subject, domain, seed), native.is_tensor).tensors


def test_every_element_differs_between_calls() -> None:
    """Thirty calls, each against each: hardly an element in common (chance meetings of float32 values apart)."""
    made = maker(lambda: [torch.randn(64, 256)])
    calls = [made(seed)[0] for seed in range(30)]
    for first in range(30):
        for second in range(first):
            assert float((calls[first] == calls[second]).double().mean()) < 1e-3


def test_no_row_of_a_call_is_made_of_rows_of_earlier_calls() -> None:
    """Else a candidate keeps their results and corrects them: rows of sixty calls stay linearly independent."""
    made = maker(lambda: [torch.randn(8, 512)])
    rows = torch.cat([made(seed)[0] for seed in range(60)]).double()
    assert int(torch.linalg.matrix_rank(rows)) == 480
    rows /= rows.norm(dim=1, keepdim=True)
    assert float((rows @ rows.T - torch.eye(480)).abs().max()) < 0.35


def test_calls_differ_where_the_task_draws_constants() -> None:
    made = maker(lambda: [torch.linspace(1.0, 2.0, 32)])
    assert len({tuple(made(seed)[0].tolist()) for seed in range(50)}) == 50


def test_values_of_uniform_inputs_stay_in_their_interval() -> None:
    made = maker(lambda: [torch.rand(64, 256)])
    for seed in range(10):
        values = made(seed)[0]
        assert float(values.min()) >= 0
        assert 0.8 * FACTOR_LOW < float(values.max()) < 1
        assert abs(float(values.mean()) - 0.475) < 0.05


def test_structure_stays() -> None:
    made = maker(lambda: [torch.rand(64, 64).tril(), (lambda a: a + a.T)(torch.rand(64, 64))])
    for seed in range(5):
        triangle, symmetric = made(seed)
        assert torch.equal(triangle, triangle.tril())
        assert torch.equal(symmetric, symmetric.T)


def test_integers_and_masks_are_drawn_and_never_altered() -> None:
    made = maker(lambda: [torch.randint(0, 9, (64, 4)), torch.rand(64, 4) > 0.5])
    for seed in range(10):
        indices, mask = made(seed)
        assert indices.dtype == torch.int64
        assert 0 <= int(indices.min()) <= int(indices.max()) < 9
        assert mask.dtype == torch.bool
    assert len({tuple(made(seed)[0].flatten().tolist()) for seed in range(30)}) == 30


@pytest.mark.parametrize("make", [lambda: [torch.randn(16, 8).T], lambda: [torch.randn(3), {"a": torch.rand(2)}]])
def test_inputs_follow_from_their_seed(make: Callable[[], list[Any]]) -> None:
    made = maker(make)
    assert all(torch.equal(one, two) for one, two in zip(made(5), made(5), strict=True))
    assert not any(torch.equal(one, two) for one, two in zip(made(5), made(6), strict=True))
