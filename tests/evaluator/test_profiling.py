"""The profile of an accepted candidate: what it says, what it does not know, and that it changes nothing."""

from __future__ import annotations

import textwrap

import pytest
import torch

from evaluator import Evaluator
from evaluator.profiling import concluded
from evaluator.worker import profiling, schema
from tasks.records import Candidate, Evaluation, Measurement, Task

BODY = """
import torch
from torch import nn
class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
    def forward(self, x):
        {forward}
"""


def candidate(forward: str) -> Candidate:
    return Candidate(source=BODY.format(forward=textwrap.indent(forward, " " * 8).strip()))


RIGHT = candidate("return torch.relu(self.fc(x))")


def test_an_accepted_candidate_has_a_profile(evaluator: Evaluator, task: Task) -> None:
    """64 x 128 inputs, 128 x 128 weights, 128 biases, 64 x 128 outputs, of 4 bytes; 2 * 64 * 128 * 128 operations."""
    result = evaluator.evaluate(task, RIGHT, profile=True)
    assert result.outcome == "accepted", result.message
    found = result.profile
    assert found is not None
    assert found.calls >= 2
    names = {row.name for row in found.rows}
    assert {"aten::addmm", "aten::relu", profiling.OUTSIDE} <= names
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)
    relu = next(row for row in found.rows if row.name == "aten::relu")
    assert (relu.calls, relu.bytes, relu.kind) == (1.0, 2 * 64 * 128 * 4, "operator")
    assert found.bytes_per_call == 4 * (2 * 64 * 128 + 128 * 128 + 128)
    assert found.flops_per_call == 2 * 64 * 128 * 128
    assert (found.roofline, found.peak_gb_per_s, found.bound) == (None, None, "")
    assert any("not known" in text for text in found.unknown)
    assert "profile" in result.seconds_by_step
    assert Evaluation.from_json(result.to_json()) == result


def test_without_being_asked_there_is_none(evaluator: Evaluator, task: Task) -> None:
    assert evaluator.evaluate(task, RIGHT).profile is None


def test_a_rejected_candidate_has_none(evaluator: Evaluator, task: Task) -> None:
    result = evaluator.evaluate(task, candidate("return self.fc(x)"), profile=True)
    assert (result.outcome, result.profile) == ("rejected", None)


@pytest.mark.parametrize("deed", ["raise ValueError('seen')", "import os; os._exit(3)", "x.fill_(0); y = y * 0"])
def test_what_happens_under_the_profiler_changes_no_verdict(evaluator: Evaluator, task: Task, deed: str) -> None:
    forward = f"y = torch.relu(self.fc(x))\nif torch.autograd._profiler_enabled():\n    {deed}\nreturn y"
    result = evaluator.evaluate(task, candidate(forward), profile=True)
    assert result.outcome == "accepted", result.message
    assert result.profile is not None
    if "fill_" not in deed:
        assert "The profile failed: " in result.profile.unknown[0]
        assert result.profile.rows == ()
    assert evaluator.evaluate(task, RIGHT).outcome == "accepted"


def test_a_duel_profiles_this_candidate(evaluator: Evaluator, task: Task) -> None:
    result = evaluator.evaluate(task, candidate("return self.fc(x).clamp_min(0)"), against=RIGHT, profile=True)
    assert result.profile is not None, result.message
    assert "aten::clamp_min" in {row.name for row in result.profile.rows}


def test_a_task_whose_inputs_require_gradients_says_what_is_not_served(evaluator: Evaluator, task: Task) -> None:
    wants = Task(id="file:gradients", source=task.source.replace("(64, 128)", "(64, 128, requires_grad=True)"))
    (note,) = evaluator.evaluate(wants, RIGHT).notes
    assert note.endswith("the backward pass is not served.")
    assert evaluator.evaluate(task, RIGHT).notes == ()


ROWS = schema.Profiled(
    op="profiled", calls=2,
    rows=[
        schema.ProfiledRow(name="mine", kind="kernel", count=4, ns=3_000_000, bytes=-1),
        schema.ProfiledRow(name="fill", kind="kernel", count=2, ns=1_000_000, bytes=-1),
        schema.ProfiledRow(name="aten::mul", kind="operator", count=2, ns=4_000_000, bytes=1000),
    ],
)  # fmt: skip
MEASUREMENT = Measurement(speedup=1.0, ci_low=1.0, ci_high=1.0, reference_ms=2.0, candidate_ms=2.0, pairs=1)
WORK = {"input_bytes": 600_000, "parameter_bytes": 100_000, "output_bytes": 300_000, "flops": 4_000_000_000}
PEAKS = {"bytes_per_s": 1e9, "fp32_per_s": 1e12}


def test_the_roofline_is_the_larger_of_two_least_times() -> None:
    """1 MB at 1 GB/s is 1 ms of the measured 2 ms; 4 GFLOP at 1 TFLOP/s are 4 ms, at 8 TFLOP/s half a millisecond."""
    found = concluded(ROWS, WORK, {**PEAKS, "fp32_per_s": 8e12}, MEASUREMENT, "fp32", "H200")
    assert (found.roofline, found.bound) == (pytest.approx(0.5), "memory")
    assert found.gb_per_s == pytest.approx(0.5)
    assert [(row.calls, row.us, row.share, row.bytes) for row in found.rows] == [
        (2.0, 1500.0, 0.75, None), (1.0, 500.0, 0.25, None), (1.0, 2000.0, 1.0, 1000)
    ]  # fmt: skip
    found = concluded(ROWS, WORK, PEAKS, MEASUREMENT, "fp32", "H200")
    assert (found.roofline, found.bound) == (pytest.approx(2.0), "arithmetic")


def test_what_is_not_known_is_said() -> None:
    half = concluded(ROWS, WORK, PEAKS, MEASUREMENT, "bf16", "H200")
    assert (half.roofline, half.bound) == (pytest.approx(0.5), "memory")
    assert any("bf16" in text for text in half.unknown)
    bare = concluded(ROWS, {**WORK, "flops": 0}, {}, MEASUREMENT, "fp32", "cpu")
    assert (bare.roofline, bare.flops_per_call) == (None, None)
    assert len(bare.unknown) == 3


def test_views_and_allocations_move_nothing_and_expanded_tensors_what_they_hold() -> None:
    with profiling.OperandBytes() as operands:
        x = torch.ones(10, 10)
        y = x.t()[:5]
        torch.add(y, torch.ones(1).expand(5, 10))
        torch.empty_like(x)
    assert operands.by_name["aten::add"] == 200 + 4 + 200
    assert operands.by_name["aten::t"] == operands.by_name["aten::empty_like"] == 0


def test_names_of_a_profile_are_printable_and_short() -> None:
    row = profiling._row("a\x1b[31m" + "b" * 500, "operator", 1, 1.0, -1)
    assert "\x1b" not in row["name"]
    assert len(row["name"]) == profiling.NAME_LENGTH
