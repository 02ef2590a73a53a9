"""Two candidates against each other: what is timed, that both are checked, and whose fault is whose."""

from __future__ import annotations

import textwrap

import pytest

from evaluator import Evaluator
from tasks.records import Candidate, Evaluation, Task

BODY = """
import torch
from torch import nn
class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.calls = 0
    def forward(self, x):
        {forward}
"""
WORK = "for _ in range({times}):\n    y = torch.relu(self.fc(x))\nreturn y"


def candidate(forward: str) -> Candidate:
    return Candidate(source=BODY.format(forward=textwrap.indent(forward, " " * 8).strip()))


FAST, SLOW = candidate(WORK.format(times=1)), candidate(WORK.format(times=4))
WRONG = candidate("return self.fc(x)")
LATER_WRONG = candidate("self.calls += 1\nreturn torch.relu(self.fc(x)) + (self.calls > 60)")


def against(evaluator: Evaluator, task: Task, own: Candidate, other: Candidate) -> Evaluation:
    result = evaluator.evaluate(task, own, against=other)
    assert Evaluation.from_json(result.to_json()) == result
    assert (result.baseline, result.against) == ("candidate", other.content_hash)
    return result


def test_the_speedup_is_over_the_other_candidate(evaluator: Evaluator, task: Task) -> None:
    faster, slower = against(evaluator, task, FAST, SLOW), against(evaluator, task, SLOW, FAST)
    assert faster.measurement is not None, faster.message
    assert slower.measurement is not None, slower.message
    assert faster.measurement.ci_low > 1.5
    assert slower.measurement.ci_high < 0.7
    assert faster.measurement.reference_ms > 1.5 * faster.measurement.candidate_ms
    assert "the speed of the other candidate" in faster.message
    assert {tally["step"] for tally in faster.facts["draws"]} >= {"check", "time"}


def test_a_candidate_against_itself_is_as_fast(evaluator: Evaluator, task: Task) -> None:
    result = against(evaluator, task, SLOW, SLOW)
    assert result.measurement is not None, result.message
    assert 0.8 < result.measurement.speedup < 1.25


def test_this_candidate_s_fault_is_its_own(evaluator: Evaluator, task: Task) -> None:
    result = against(evaluator, task, WRONG, FAST)
    assert (result.outcome, result.reason, result.step) == ("rejected", "incorrect", "check"), result.message


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (WRONG, "incorrect"),
        (Candidate(source="class ModelNew(:"), "contract"),
        (candidate("import os; os._exit(0)"), "crash"),
        (LATER_WRONG, "incorrect"),
    ],
)
def test_the_other_candidate_s_fault_is_said_and_not_this_one_s(
    evaluator: Evaluator, task: Task, other: Candidate, reason: str
) -> None:
    result = against(evaluator, task, FAST, other)
    assert (result.outcome, result.reason) == ("unscored", "other_rejected"), result.message
    assert result.message.startswith(f"The other candidate was rejected ({reason}): ")
    assert result.detail["other"]["reason"] == reason
    assert result.measurement is None


def test_a_wrong_timed_call_of_this_candidate_rejects_it(evaluator: Evaluator, task: Task) -> None:
    result = against(evaluator, task, LATER_WRONG, FAST)
    assert (result.outcome, result.reason) == ("rejected", "incorrect"), result.message


def test_a_duel_leaves_the_evaluator_as_it_was(evaluator: Evaluator, task: Task) -> None:
    against(evaluator, task, FAST, WRONG)
    result = evaluator.evaluate(task, FAST)
    assert (result.outcome, result.baseline, result.against) == ("accepted", "eager", "")
