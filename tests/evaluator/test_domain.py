"""Which inputs are perturbed, how far, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from evaluator.judgement.facts import DrawKind
from evaluator.reference.domain import Domain, draw_inputs, exact_inputs, explore, traits_of, transformed
from evaluator.reference.subject import Subject


class Formula(torch.nn.Module):
    """A module without parameters from a function."""

    def __init__(self, formula: Callable[..., Any]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, *inputs: Any) -> Any:
        return self.formula(*inputs)


def subject(formula: Callable[..., Any], make_inputs: Callable[[], list[Any]]) -> Subject:
    return Subject(Formula(formula), make_inputs)


def normal() -> list[Any]:
    return [torch.randn(32, 64)]


def positive() -> list[Any]:
    return [torch.rand(32, 64) + 0.01]


def test_a_formula_for_all_numbers_admits_every_kind() -> None:
    domain = explore(subject(torch.tanh, normal), 1)
    assert domain.kinds == ("as_given", "shifted", "scaled", "flipped")
    assert (domain.shift_low, domain.shift_high, domain.scale_low, domain.scale_high) == (-4, 4, 0.125, 8)


def test_a_logarithm_admits_only_what_stays_positive() -> None:
    domain = explore(subject(torch.log, positive), 1)
    assert domain.kinds == ("as_given", "shifted", "scaled")
    assert (domain.shift_low, domain.shift_high) == (0, 4)
    for seed in range(20):
        assert bool((draw_inputs(subject(torch.log, positive), domain, "shifted", seed)[0] > 0).all())


def test_an_exponential_of_large_numbers_admits_no_scaling_up() -> None:
    domain = explore(subject(lambda x: torch.exp(x * 20), normal), 1)
    assert domain.scale_high == 1.0
    assert "scaled" in domain.kinds
    for seed in range(10):
        scaled = draw_inputs(subject(torch.exp, normal), domain, "scaled", seed)[0]
        assert scaled.std() < 0.7


def test_where_the_reference_has_infinities_of_its_own_they_are_no_obstacle() -> None:
    mask = torch.where(torch.ones(32, 64).tril().bool(), 0.0, -torch.inf)
    domain = explore(subject(lambda x: x + mask, normal), 1)
    assert domain.kinds == ("as_given", "shifted", "scaled", "flipped")


def test_a_formula_that_raises_on_other_inputs_is_left_as_given() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()) or bool((x > 1.02).any()):
            raise ValueError("out of range")
        return x

    assert explore(subject(picky, lambda: [torch.rand(8, 8)]), 1).kinds == ("as_given", "scaled")


MIXED_INPUTS: list[tuple[str, torch.Tensor, str, bool, bool]] = [
    ("normal", torch.randn(64, 64), "float", False, False),
    ("triangle", torch.rand(64, 64).triu(), "float", True, True),
    ("symmetric", (lambda a: a + a.T)(torch.rand(64, 64)), "float", False, True),
    ("probabilities", torch.softmax(torch.randn(64, 8), -1), "float", False, True),
    ("mask of zeros and ones", (torch.rand(64, 64) > 0.5).float(), "mask", False, False),
    ("labels of plus and minus one", (torch.rand(64) > 0.5).float() * 2 - 1, "mask", False, False),
    ("additive mask", torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf), "mask", False, False),
    ("indices", torch.randint(0, 9, (64,)), "integer", False, False),
    ("sorted offsets", torch.arange(9), "integer", False, True),
    ("booleans", torch.rand(64) > 0.5, "bool", False, False),
    ("one number", torch.tensor(3.0), "float", False, False),
]


@pytest.mark.parametrize(
    ("name", "value", "kind", "keeps", "fixed"), MIXED_INPUTS, ids=[row[0] for row in MIXED_INPUTS]
)
def test_traits(name: str, value: torch.Tensor, kind: str, keeps: bool, fixed: bool) -> None:
    (trait,) = traits_of([value])
    assert (trait.kind, trait.keeps_zeros, trait.fixed_structure) == (kind, keeps, fixed)


@pytest.mark.parametrize(
    ("name", "value", "kind", "keeps", "fixed"), MIXED_INPUTS, ids=[row[0] for row in MIXED_INPUTS]
)
def test_only_floating_values_move_and_dtypes_stay(
    name: str, value: torch.Tensor, kind: str, keeps: bool, fixed: bool
) -> None:
    traits = traits_of([value])
    for change in ({"shift": 3.0}, {"scale": 0.5}, {"scale": -1.0}):
        (moved,) = transformed([value], traits, **change)
        assert moved.dtype == value.dtype
        assert torch.equal(moved, value) == (kind != "float")
        if keeps:
            assert torch.equal(moved == 0, value == 0)


def nested() -> list[Any]:
    return [torch.randn(4, 4), [torch.randint(0, 5, (4,)), {"bias": torch.randn(4)}], 2.5]


def test_nested_inputs_and_plain_scalars_pass_through() -> None:
    target = subject(lambda x, pair, s: x + pair[1]["bias"][pair[0] % 4] * s, nested)
    domain = explore(target, 3)
    assert [trait.path for trait in domain.traits] == ["0", "1.0", "1.1.bias"]
    drawn = draw_inputs(target, domain, "flipped", 5)
    given = target.draw(5)
    assert torch.equal(drawn[0], -given[0])
    assert torch.equal(drawn[1][0], given[1][0])
    assert torch.equal(drawn[1][1]["bias"], -given[1][1]["bias"])
    assert drawn[2] == 2.5


@pytest.mark.parametrize("kind", ["as_given", "shifted", "scaled", "flipped"])
def test_a_draw_follows_from_its_seed(kind: DrawKind) -> None:
    target = subject(torch.tanh, normal)
    domain = explore(target, 1)
    first, again, other = (draw_inputs(target, domain, kind, seed)[0] for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_shifts_and_scales_are_far_from_nothing_and_within_their_range() -> None:
    target = subject(torch.tanh, normal)
    domain = explore(target, 1)
    for seed in range(40):
        given = target.draw(seed)[0]
        shift = (draw_inputs(target, domain, "shifted", seed)[0] - given).mean().abs()
        scale = draw_inputs(target, domain, "scaled", seed)[0].norm() / given.norm()
        assert 0.99 <= shift <= 4.01
        assert 0.124 <= scale <= 0.17 or 5.9 <= scale <= 8.01


def test_a_draw_leaves_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    subject(torch.tanh, normal).draw(3)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_kind_that_is_not_admitted_is_refused() -> None:
    with pytest.raises(ValueError, match="admits no flipped"):
        draw_inputs(subject(torch.log, positive), Domain(), "flipped", 1)


def test_exact_inputs_are_integers_with_more_bits_than_reduced_precisions_keep() -> None:
    """12 bits in the first input: bfloat16 keeps 8 and TF32 11 of them; one bit in the second; structure stays."""
    inputs = [torch.randn(64, 64), torch.randn(64, 64).triu()]
    first, second = exact_inputs(inputs, traits_of(inputs), 3, 1.0)
    assert torch.equal(first, first.round())
    assert float(first.abs().max()) > 2048
    assert not torch.equal(first, first.bfloat16().float())
    assert set(second.unique().tolist()) == {-1.0, 0.0, 1.0}
    assert torch.equal(second, second.triu())
    symmetric = inputs[0] + inputs[0].T
    (drawn,) = exact_inputs([symmetric], traits_of([symmetric]), 3, 1.0)
    assert torch.equal(drawn, drawn.T)
    sparse, _ = exact_inputs(inputs, traits_of(inputs), 3, 0.25)
    assert 0.2 < float((sparse != 0).double().mean()) < 0.3
    assert float(sparse.abs().max()) > 2048
