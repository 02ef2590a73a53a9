"""Comparison under a budget: what passes, what does not, and what the evidence says."""

from __future__ import annotations

import math

import pytest
import torch

from evaluator.reference.budget import ErrorBudget, LeafBudget
from evaluator.reference.comparison import (
    compare_call,
    compare_leaf,
    holds_pattern,
    rms,
    same_bits,
    tile_errors,
    within_loose,
)

EPSILON = 2.0**-23
BUDGET = LeafBudget(rms_rel=16 * EPSILON, max_rel=64 * EPSILON, half_rms_rel=2e-3)
CALL_BUDGET = ErrorBudget(leaves=(BUDGET,))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def call(output: torch.Tensor, expected: torch.Tensor, **more: object):
    return compare_call([("0", output)], [("0", expected)], CALL_BUDGET, **more)  # type: ignore[arg-type]


def test_equal_outputs_are_right_and_bit_equal() -> None:
    expected = normal(64, 2048)
    result = call(expected.clone(), expected)
    assert result.aspects == ()
    assert result.bit_equal


def test_rounding_differences_are_right_and_not_bit_equal() -> None:
    expected = normal(64, 2048)
    result = call(expected * (1 + EPSILON), expected)
    assert result.aspects == ()
    assert not result.bit_equal
    assert 0 < result.worst_ratio < 0.2


@pytest.mark.parametrize("shape", [(64, 2048), (5000, 3), (3, 700, 900), (1,), (), (2, 600_000)])
@pytest.mark.parametrize("layout", ["row", "column"])
def test_one_wrong_element_is_found_with_its_index_and_values(shape: tuple[int, ...], layout: str) -> None:
    expected = normal(*shape)
    output = expected.clone()
    place = tuple(length // 3 for length in shape)
    output[place] = expected[place] + 0.5
    if layout == "column" and output.dim() >= 2:
        output = output.transpose(0, -1).contiguous().transpose(0, -1)
    result = call(output, expected)
    assert result.aspects == ("budget",)
    assert result.index == place
    assert float(result.got) == pytest.approx(float(output[place]), rel=1e-6)
    assert float(result.expected) == pytest.approx(float(expected[place]), rel=1e-6)
    assert float(result.error) == pytest.approx(0.5, rel=1e-2)


def test_a_small_error_everywhere_breaks_the_rms_budget_alone() -> None:
    """30 ulp everywhere: below the maximum's 64, above the RMS's 16."""
    expected = torch.ones(8, 1024)
    assert call(expected + 30 * EPSILON, expected).aspects == ("budget",)
    one = expected.clone()
    one[3, 5] += 30 * EPSILON
    assert call(one, expected).aspects == ()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_must_be_at_the_same_places(value: float) -> None:
    expected = normal(16, 1024)
    output = expected.clone()
    output[2, 3] = value
    result = call(output, expected)
    assert result.aspects == ("masks",)
    assert result.index == (2, 3)
    assert call(expected, output).aspects == ("masks",)
    assert call(output.clone(), output).aspects == ()
    assert call(torch.full_like(expected, value), expected).aspects == ("masks",)


def test_infinities_of_other_sign_differ() -> None:
    expected = normal(16, 1024)
    expected[1, 1] = math.inf
    output = expected.clone()
    output[1, 1] = -math.inf
    assert call(output, expected).aspects == ("masks",)


def test_zeros_never_pass_for_small_values() -> None:
    for scale in (1.0, 1e-5, 1e-20, 1e-30, 1e30):
        expected = normal(16, 1024) * scale
        assert call(torch.zeros_like(expected), expected).aspects == ("budget",), scale
        assert call(expected * (1 + EPSILON), expected).aspects == (), scale


def test_a_zero_reference_wants_zeros() -> None:
    expected = torch.zeros(4, 1024)
    assert call(torch.zeros_like(expected), expected).aspects == ()
    assert call(torch.full_like(expected, 1e-12), expected).aspects == ("budget",)


def test_a_wrong_entry_is_not_hidden_by_large_ones() -> None:
    """One small row of zeros among rows a million times larger."""
    expected = normal(8, 2048) * 1e6
    expected[5] = normal(2048, seed=1)
    output = expected.clone()
    output[5] = 0
    result = call(output, expected)
    assert result.aspects == ("budget",)
    assert result.index[0] == 5


def test_half_precision_is_told_from_a_wrong_formula() -> None:
    expected = normal(64, 2048)
    half = call(expected.bfloat16().float(), expected)
    assert half.aspects == ("budget",)
    assert half.half_like
    assert half.loose_ok
    off = call(expected * 1.1, expected)
    assert not off.half_like
    assert not off.loose_ok


def test_integers_and_bools_must_be_equal() -> None:
    for dtype in (torch.int64, torch.uint8, torch.bool):
        expected = (normal(300, 7) > 0).to(dtype)
        output = expected.clone()
        output[200, 6] = not output[200, 6]
        budget = ErrorBudget(leaves=(LeafBudget(exact=True),))
        assert compare_call([("0", expected.clone())], [("0", expected)], budget).aspects == ()
        result = compare_call([("0", output)], [("0", expected)], budget)
        assert (result.aspects, result.index, result.half_like) == (("budget",), (200, 6), False)


def test_the_answer_of_an_earlier_call_is_a_replay() -> None:
    first, second, third = (normal(16, 1024, seed=seed) for seed in range(3))
    earlier = [[("0", first)], [("0", second)]]
    assert call(second.clone(), third, earlier=earlier).aspects == ("stale",)
    assert call(second * (1 + EPSILON), third, earlier=earlier).aspects == ("stale",)
    assert call(torch.zeros_like(third), third, earlier=earlier).aspects == ("budget",)
    assert call(third.clone(), third, earlier=earlier).aspects == ()


def test_earlier_answers_are_not_made_for_right_calls() -> None:
    def never():
        raise AssertionError("asked for an earlier answer")
        yield

    expected = normal(4, 1024)
    assert call(expected.clone(), expected, earlier=never()).aspects == ()


def test_the_poison_pattern_tells_unwritten_memory() -> None:
    pattern = 0xFFC0DEAD
    expected = normal(16, 1024)
    output = expected.clone()
    output.view(torch.int32)[3, 4] = pattern - (1 << 32)
    assert holds_pattern(output, pattern)
    assert not holds_pattern(expected, pattern)
    assert call(output, expected, pattern=pattern).aspects == ("unwritten",)
    assert call(output, expected).aspects == ("masks",)


def test_outputs_of_several_leaves_name_the_wrong_one() -> None:
    budget = ErrorBudget(leaves=(BUDGET, BUDGET.model_copy(update={"path": "1.h"})))
    good, bad = normal(4, 100), normal(4, 100, seed=1)
    result = compare_call([("0", good), ("1.h", bad + 1)], [("0", good.clone()), ("1.h", bad)], budget)
    assert (result.leaf, result.aspects) == ("1.h", ("budget",))


def test_other_shapes_are_an_earlier_defences_affair() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        compare_leaf(torch.zeros(3), torch.zeros(3, 1), BUDGET)


def test_the_loose_rule_is_that_of_allclose() -> None:
    expected = torch.tensor([0.0, 1.0, 100.0, math.nan])
    assert within_loose(expected + torch.tensor([0.009, 0.019, 1.0, 0.0]), expected)
    assert not within_loose(expected + torch.tensor([0.011, 0.0, 0.0, 0.0]), expected)
    assert not within_loose(torch.tensor([0.0, 1.0, 100.0, 1.0]), expected)


def test_same_bits_sees_signed_zeros_and_equal_nans() -> None:
    one = [("0", torch.tensor([0.0, math.nan]))]
    assert same_bits(one, [("0", torch.tensor([0.0, math.nan]))])
    assert not same_bits(one, [("0", torch.tensor([-0.0, math.nan]))])
    assert not same_bits(one, [("0", torch.tensor([[0.0, math.nan]]))])
    assert not same_bits(one, [("1", torch.tensor([0.0, math.nan]))])


def test_rms_in_chunks_is_the_plain_one() -> None:
    values = normal(3, 500_000) * 3
    assert rms(values) == pytest.approx(float(values.double().square().mean().sqrt()), rel=1e-12)


def test_tile_errors_are_in_the_units_of_the_comparison() -> None:
    """Ones against 1.5: RMS and largest error 0.5, size 1 (the output's own)."""
    seen = tile_errors(torch.ones(2, 1024), torch.full((2, 1024), 1.5))
    assert seen.error_rms.tolist() == [0.5, 0.5]
    assert seen.error_max.tolist() == [0.5, 0.5]
    assert seen.tile_rms.tolist() == [1.0, 1.0]
    assert seen.leaf_rms == 1.0


def test_a_running_sums_floor_is_that_of_its_row() -> None:
    """A tile of small values in a row of large ones may err in proportion to the row, not to itself."""
    row = torch.cat([torch.full((1024,), 1000.0), torch.full((1024,), 1.0)])
    expected = torch.stack([row, row])
    budget = ErrorBudget(leaves=(LeafBudget(rms_floor=16 * EPSILON, max_floor=64 * EPSILON),))
    output = expected.clone()
    output[:, 1024:] += 1e-3
    assert compare_call([("0", output)], [("0", expected)], budget).aspects == ()
    output[:, 1024:] += 1e-2
    assert compare_call([("0", output)], [("0", expected)], budget).aspects == ("budget",)
