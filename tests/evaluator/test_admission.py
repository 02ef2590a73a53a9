"""Admission: degenerate tasks are found, sound ones are not, random ones are quietened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from evaluator.reference.admission import Admission, admit
from evaluator.reference.adversaries import passes, poisoned, rounded
from evaluator.reference.budget import ErrorBudget, LeafBudget
from evaluator.reference.subject import Subject, load_subject

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"


def task(forward: str, inputs: str = "torch.randn(64, 1024)", init: str = "pass") -> Subject:
    return load_subject(
        f"{HEAD}class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n        {init}\n"
        f"    def forward(self, x):\n        {forward}\n"
        f"def get_inputs():\n    return [{inputs}]\ndef get_init_inputs():\n    return []\n"
    )


SOUND = {
    "tanh": task("return torch.tanh(x)"),
    "softmax of bounded scores": task("return torch.softmax(torch.tanh(x), dim=-1)"),
    "equal rows": task("return torch.tanh(x).repeat(32, 1)", "torch.randn(1, 1024)"),
    "a loss, one number": task("return F.mse_loss(x, x.roll(1, 0))"),
    "linear": task("return self.fc(x)", init="self.fc = nn.Linear(1024, 64)"),
    "integers": task("return x.argmax(dim=1)"),
}
DEGENERATE = {
    "mean of a normalised row": (
        task("return F.layer_norm(x, (1024,)).mean(-1)"),
        {"zeros", "mean", "previous_output"},
    ),
    "softmax over one": (task("return torch.softmax(x.sum(1, keepdim=True), dim=1)"), set()),
    "minus its own mean": (task("x = x.amax(1, keepdim=True); return F.gelu(x - x.mean(1, keepdim=True))"), set()),
    "clamped away": (task("return torch.clamp(torch.min(x, torch.tensor(0.0)), 0.0, 1.0)"), set()),
    "normalised, as constructed": (
        task("return self.n(x).mean(-1)", init="self.n = nn.LayerNorm(1024)"),
        {"zeros", "mean", "previous_output"},
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_tasks_let_no_adversary_pass(name: str) -> None:
    admission = admit(SOUND[name], secret=1)
    assert admission.passed == ()
    assert not admission.degenerate
    assert not admission.precision_blind
    assert admission.repeats


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_tasks_are_found_and_show_poison(name: str) -> None:
    subject, passing = DEGENERATE[name]
    admission = admit(subject, secret=1)
    assert admission.degenerate
    assert passing <= set(admission.passed)
    assert admission.poison_shows
    assert admission.output_constant == (not passing)


def test_random_references_are_quietened_where_dropout_makes_them_random() -> None:
    subject = task("return self.d(torch.tanh(x))", init="self.d = nn.Dropout(0.3)")
    subject.module.train()
    admission = admit(subject, secret=1)
    assert (admission.randomness, admission.degenerate) == ("dropout", False)
    assert admit(task("return x + torch.rand_like(x)"), secret=1).randomness == "inherent"
    assert admit(task("return F.dropout(x, 0.0)"), secret=1).randomness == "none"


def test_parameters_that_do_nothing_are_noted() -> None:
    idle = task("return torch.tanh(x) + 0 * self.fc(x).sum()", init="self.fc = nn.Linear(1024, 4)")
    assert not admit(idle, secret=1).parameters_matter
    assert admit(SOUND["linear"], secret=1).parameters_matter


def test_precision_blindness_is_noted_apart() -> None:
    """A long sum of positive values averages single roundings away, whatever is drawn, and is not linear."""
    admission = admit(task("return torch.sigmoid(x).sum(dim=1)", "torch.rand(16, 16384)"), secret=1)
    assert admission.precision_blind
    assert not admission.degenerate
    assert not admit(SOUND["tanh"], secret=1).precision_blind


def test_long_positive_sums_average_a_downgrade_away_and_exact_draws_show_it() -> None:
    admission = admit(task("return x.sum(dim=1)", "torch.rand(16, 16384)"), secret=1)
    assert "lower_precision" in admission.passed
    assert "exact" in admission.domain.kinds
    assert not admission.precision_blind


def test_every_kind_has_a_budget_and_it_survives_json() -> None:
    admission = admit(SOUND["linear"], secret=1)
    assert [budget.kind for budget in admission.budgets] == list(admission.domain.kinds)
    assert "exact" in admission.domain.kinds
    assert Admission.model_validate_json(admission.model_dump_json()) == admission
    assert admission.budget("as_given", constructed=True) == admission.constructed_budget
    with pytest.raises(KeyError):
        Admission(domain=admission.domain, budgets=()).budget("flipped")


def test_kinds_can_be_limited() -> None:
    assert admit(SOUND["linear"], secret=1, kinds=["as_given", "flipped"]).domain.kinds == ("as_given", "flipped")


def test_as_constructed_noise_says_nothing_about_drawn_parameters() -> None:
    """With identity scales the mean of normalised rows is rounding noise; with drawn ones it is a number."""
    subject, _ = DEGENERATE["normalised, as constructed"]
    admission = admit(subject, secret=1)
    assert admission.budget("as_given").leaves[0].rms_rel < 1e-3
    assert admission.budget("as_given", constructed=True).leaves[0].rms_rel > 1


def test_rounding_keeps_the_mantissa_bits_asked_for() -> None:
    """1 + 2^-11 at 10 bits is a tie that goes up to 1 + 2^-10; 1 + 2^-12 goes down."""
    values = torch.tensor([1 + 2.0**-11, 1 + 2.0**-12, -3.0, 1e38, float("inf")])
    assert rounded(values, 10).tolist()[:3] == [1 + 2.0**-10, 1.0, -3.0]
    assert bool(torch.isinf(rounded(values, 10)[4]))
    assert torch.equal(rounded(torch.arange(5), 3), torch.arange(5))


def test_poison_reaches_every_entry_and_only_floating_inputs() -> None:
    values, indices = poisoned([torch.randn(3, 4, 5), torch.arange(3)])
    assert torch.isnan(values).reshape(3, -1).sum(1).tolist() == [1, 1, 1]
    assert indices.tolist() == [0, 1, 2]


def test_an_adversary_that_is_the_answer_says_nothing() -> None:
    budget = ErrorBudget(leaves=(LeafBudget(rms_rel=1e-6, max_rel=1e-5),))
    answer = [("0", torch.ones(4))]
    assert passes([("0", torch.ones(4))], answer, budget) is None
    assert passes([("0", torch.ones(3))], answer, budget) is None
    assert passes([("0", torch.ones(4) + 1e-7)], answer, budget) is True
    assert passes([("0", torch.zeros(4))], answer, budget) is False


SHRUNK = {
    23: (("batch_size = 128", "batch_size = 8"), ("D, H, W = 24, 32, 32", "D, H, W = 12, 16, 16")),
    66: (("16384", "1024"),),
    80: (("8192", "512"), ("batch_size = 1024", "batch_size = 128")),
    83: (("batch_size = 128", "batch_size = 8"), ("16, 64, 64", "8, 16, 16")),
}


@pytest.mark.parametrize("number", SHRUNK)
def test_kernelbench_tasks_that_measure_little_are_reported_apart(shared_dir: Path, number: int) -> None:
    """Level 2, smaller shapes: 23, 80, 83 are constant; 66 is random (dropout), sound with its random part off."""
    with (shared_dir / "data" / "kernelbench.jsonl").open() as lines:
        rows = [row for row in map(json.loads, lines) if (row["level"], row["problem_id"]) == (2, number)]
    (source,) = (row["code"] for row in rows)
    for old, new in SHRUNK[number]:
        assert old in source
        source = source.replace(old, new)
    admission = admit(load_subject(source), secret=9)
    assert admission.degenerate == (number != 66)
    assert admission.randomness == ("dropout" if number == 66 else "none")
    assert number == 66 or admission.poison_shows
