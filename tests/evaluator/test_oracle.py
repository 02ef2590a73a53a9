"""Budgets from the float64 oracle: honest arithmetic passes, reduced precision and approximations do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from evaluator.reference.comparison import compare_call
from evaluator.reference.domain import explore
from evaluator.reference.oracle import Oracle, OracleImpossible, assumed_budget, build_budget, find_exact_density
from evaluator.reference.subject import Subject


class Formula(torch.nn.Module):
    """A module without parameters from a function."""

    def __init__(self, formula: Callable[..., Any]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, *inputs: Any) -> Any:
        return self.formula(*inputs)


def subject(formula: Callable[..., Any], *shapes: tuple[int, ...]) -> Subject:
    return Subject(Formula(formula), lambda: [torch.randn(shape) for shape in shapes])


def verdict(formula: Callable[..., Any], candidate: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[str, ...]:
    """Aspects of a candidate's error on inputs that the budget was not made from."""
    target = subject(formula, *shapes)
    budget = build_budget(target, explore(target, 0), "as_given", [1, 2])
    assert budget.oracle == "float64"
    inputs = target.draw(99)
    output = [("0", candidate(*inputs))]
    return compare_call(output, target.run(inputs), budget).aspects


def matmul_in_order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One float32 accumulator an element, terms added in order: what a first CUDA kernel does."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        total += a[:, k : k + 1] * b[k : k + 1]
    return total


def cumsum_in_order(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.add.accumulate(x.numpy(), axis=1, dtype=np.float32))


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Ten explicit mantissa bits."""
    return ((x.view(torch.int32) + 0x1000) >> 13 << 13).view(torch.float32)


def logsumexp_in_blocks(x: torch.Tensor) -> torch.Tensor:
    parts = x.reshape(x.shape[0], -1, 128)
    largest = parts.amax(dim=2)
    sums = (parts - largest.unsqueeze(2)).exp().sum(dim=2)
    top = largest.amax(dim=1, keepdim=True)
    return (sums * (largest - top).exp()).sum(dim=1).log() + top.squeeze(1)


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


def layer_norm_one_pass(x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) * torch.rsqrt(variance + 1e-5)


MATMUL = ((48, 1024), (1024, 40))
HONEST: list[tuple[str, Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
    ("matmul in order", torch.matmul, matmul_in_order, MATMUL),
    ("matmul in double", torch.matmul, lambda a, b: (a.double() @ b.double()).float(), MATMUL),
    ("cumsum in order", lambda x: torch.cumsum(x, 1), cumsum_in_order, ((64, 4096),)),
    ("cumsum in double", lambda x: torch.cumsum(x, 1), lambda x: torch.cumsum(x.double(), 1).float(), ((64, 4096),)),
    ("logsumexp in blocks", lambda x: torch.logsumexp(x, 1), logsumexp_in_blocks, ((256, 1024),)),
    ("one-pass variance", layer_norm, layer_norm_one_pass, ((64, 1024),)),
    ("gelu by erf", torch.nn.functional.gelu, lambda x: 0.5 * x * (1 + torch.erf(x * 0.5**0.5)), ((64, 1024),)),
    ("softmax in two steps", lambda x: torch.softmax(x, 1), lambda x: x.exp() / x.exp().sum(1, True), ((64, 1024),)),
]
CHEAP: list[tuple[str, Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
    ("matmul in bfloat16", torch.matmul, lambda a, b: (a.bfloat16() @ b.bfloat16()).float(), MATMUL),
    ("matmul in half", torch.matmul, lambda a, b: (a.half() @ b.half()).float(), MATMUL),
    ("matmul in TF32", torch.matmul, lambda a, b: tf32(a) @ tf32(b), MATMUL),
    ("softmax as zeros", lambda x: torch.softmax(x, 1), torch.zeros_like, ((64, 4096),)),
    ("softmax in half", lambda x: torch.softmax(x, 1), lambda x: torch.softmax(x.half(), 1).float(), ((64, 1024),)),
    ("gelu by tanh", torch.nn.functional.gelu, lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
     ((64, 1024),)),
    ("forgotten epsilon", lambda x: x / (x.norm(dim=1, keepdim=True) + 1e-2), lambda x: x / x.norm(dim=1, keepdim=True),
     ((64, 1024),)),
    ("cumsum with a carry", lambda x: torch.cumsum(x, 1), lambda x: torch.cumsum(x, 1) + 1e-2, ((64, 4096),)),
    ("one of a thousand left out", lambda x: x.sum(1), lambda x: x[:, 1:].sum(1), ((256, 1024),)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "formula", "candidate", "shapes"), HONEST, ids=[row[0] for row in HONEST])
def test_honest_arithmetic_is_within_budget(
    name: str, formula: Callable[..., Any], candidate: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]
) -> None:
    assert verdict(formula, candidate, *shapes) == ()


@pytest.mark.parametrize(("name", "formula", "candidate", "shapes"), CHEAP, ids=[row[0] for row in CHEAP])
def test_cheap_arithmetic_is_over_budget(
    name: str, formula: Callable[..., Any], candidate: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]
) -> None:
    assert verdict(formula, candidate, *shapes) == ("budget",)


def test_few_cancelling_tiles_do_not_excuse_the_others() -> None:
    """One row in fifty is pure cancellation; the relative part stays near the other rows' error."""

    def formula(x: torch.Tensor) -> torch.Tensor:
        rows = x.clone()
        rows[:2] = (x[:2] + 1e6) - 1e6 + 1e-3
        return rows

    target = subject(formula, (100, 1024))
    (leaf,) = build_budget(target, explore(target, 0), "as_given", [1]).leaves
    assert leaf.rms_rel < 1e-6
    assert leaf.rms_abs > 1e-3


def test_a_reference_with_a_fixed_dtype_still_has_an_oracle() -> None:
    """Tensors that forward makes are float64 as well, since that is the default then."""
    target = subject(lambda x: x @ torch.eye(64) + torch.zeros(64), (16, 64))
    assert Oracle(target).run(target.draw(1))[0][1].dtype == torch.float64


def test_where_no_oracle_can_run_the_budget_says_so() -> None:
    def stubborn(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return x * 2

    target = subject(stubborn, (16, 64))
    budget = build_budget(target, explore(target, 0), "as_given", [1])
    assert (budget.oracle, budget.note) == ("assumed", "float32 only")
    inputs = target.draw(2)
    assert compare_call(target.run(inputs), target.run(inputs), budget).aspects == ()
    half = [("0", (inputs[0].half() * 2).float())]
    assert compare_call(half, target.run(inputs), budget).aspects == ("budget",)


def test_too_large_for_float64_is_no_oracle() -> None:
    target = subject(torch.tanh, (64, 64))
    with pytest.raises(OracleImpossible, match="32768 bytes of 100"):
        Oracle(target, limit_bytes=100).run(target.draw(1))


def test_integer_outputs_must_be_equal() -> None:
    target = subject(lambda x: (x.argmax(1), x), (16, 64))
    first, second = build_budget(target, explore(target, 0), "as_given", [1]).leaves
    assert (first.path, first.exact, second.path, second.exact) == ("0", True, "1", False)
    assert [leaf.exact for leaf in assumed_budget({"0": True, "1": False}, "as_given", "fp32", "").leaves] == [
        True,
        False,
    ]


class Linear(torch.nn.Module):
    """A linear layer, scaled by 0.002 where asked."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(256, 64)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


EXACT = [
    ("matmul", subject(torch.matmul, (32, 256), (256, 32)), True),
    ("linear layer", Subject(Linear(), lambda: [torch.randn(32, 256)]), True),
    ("linear layer, scaled", Subject(Linear(0.002), lambda: [torch.randn(32, 256)]), False),
    ("cumsum", subject(lambda x: torch.cumsum(x, 1), (32, 512)), True),
    ("relu of a sum is not linear", subject(lambda x: torch.relu(x.sum(1)), (32, 512)), False),
    ("rounding is not linear", subject(lambda x: torch.round(x * 0.3), (32, 512)), False),
    ("mean of 100 is no integer", subject(lambda x: x.mean(1), (32, 100)), False),
    ("tanh", subject(torch.tanh, (32, 64)), False),
    ("always zero", subject(lambda x: x * 0, (32, 64)), False),
]


@pytest.mark.parametrize(("name", "target", "linear"), EXACT, ids=[row[0] for row in EXACT])
def test_exact_draws_are_for_linear_tasks(name: str, target: Subject, linear: bool) -> None:
    density = find_exact_density(target, explore(target, 0), 7)
    assert density == (1.0 if linear else 0.0)


def test_exact_inputs_get_sparser_with_the_sum() -> None:
    """Products of 16384 terms of 12 bits (2^11 on average) and of 0 or 1 (2/3 on average) sum to 2^24.4."""
    target = subject(torch.matmul, (4, 16384), (16384, 4))
    assert find_exact_density(target, explore(target, 0), 7) == 0.25


def test_an_exact_draw_sees_a_downgrade_and_forgives_any_order() -> None:
    target = subject(torch.matmul, *MATMUL)
    domain = explore(target, 0)
    domain = domain.model_copy(update={"kinds": (*domain.kinds, "exact"), "exact_density": 1.0})
    budget = build_budget(target, domain, "exact", [1])
    from evaluator.reference.domain import draw_inputs

    a, b = draw_inputs(target, domain, "exact", 5)
    expected = target.run([a, b])
    assert compare_call([("0", matmul_in_order(a, b))], expected, budget).bit_equal
    assert compare_call([("0", tf32(a) @ tf32(b))], expected, budget).aspects == ("budget",)
