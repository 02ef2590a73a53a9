"""The whole evaluation as on a CUDA device, on memory that stands for a device's (`fake_cuda`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluator import Evaluator, EvaluatorConfig
from evaluator.bench import LEAST_LEAD_NS, Bench
from evaluator.timing.clock import MOST_LEAD_NS
from tasks.records import Candidate
from tasks.reference_source import task_from_source

_spec = importlib.util.spec_from_file_location("fake_cuda", Path(__file__).parent / "fake_cuda.py")
assert _spec is not None
assert _spec.loader is not None
fake_cuda = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_cuda)

TASK = """
import torch
import torch.nn as nn
class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.fc = nn.Linear(n, n)
    def forward(self, x):
        return torch.relu(self.fc(x))
def get_inputs():
    return [torch.randn(64, 128)]
def get_init_inputs():
    return [128]
"""
MODEL = TASK.split("def get_inputs")[0].replace("Model(", "ModelNew(")


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Evaluator]:
    config = EvaluatorConfig.model_validate({"timing": {"cap_s": 1.5, "half_width": 0.3, "confirm_above": 50.0}})
    with Evaluator(fake_cuda.fake_device(), config) as made:
        yield made


def test_a_right_candidate_is_timed_with_every_call_right(evaluator: Evaluator) -> None:
    candidate = Candidate(source=MODEL.replace("torch.relu(self.fc(x))", "self.fc(x).relu_()"))
    evaluation = evaluator.evaluate(task_from_source(TASK, where="task"), candidate)
    assert evaluation.outcome == "accepted", evaluation.message
    assert evaluation.measurement is not None
    assert evaluation.measurement.pairs >= 2
    assert evaluation.measurement.definition == "device"
    assert not any(tally["wrong"] for tally in evaluation.facts["draws"] if "wrong" in tally)


def test_a_candidate_that_keeps_its_caller_waiting_gets_no_longer_lead() -> None:
    """It could work on its processor for as long as it claims to launch."""
    seen: list[int] = []
    config = EvaluatorConfig.model_validate({"timing": {"cap_s": 0.5, "half_width": 0.3, "confirm_above": 50.0}})
    slow = MODEL.replace("return ", "import time\n        time.sleep(0.02)\n        return ")
    for source in (MODEL, slow):
        with Evaluator(fake_cuda.fake_device(), config) as evaluator, pytest.MonkeyPatch.context() as patch:
            patch.setattr(Bench, "lead", lambda _, lead_ns: seen.append(lead_ns))
            evaluator.evaluate(task_from_source(TASK, where="task"), Candidate(source=source))
        assert LEAST_LEAD_NS < seen[-1] < MOST_LEAD_NS


def test_the_clock_latency_leaves_no_lead() -> None:
    timing = {"cap_s": 0.5, "half_width": 0.3, "confirm_above": 50.0, "clock": "latency"}
    with Evaluator(fake_cuda.fake_device(), EvaluatorConfig.model_validate({"timing": timing})) as evaluator:
        evaluation = evaluator.evaluate(task_from_source(TASK, where="task"), Candidate(source=MODEL))
    assert evaluation.measurement is not None, evaluation.message
    assert evaluation.measurement.definition == "latency"


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ("self.fc(x).sigmoid()", {"incorrect"}),
        ("x.mul_(1.0).add_(1.0) * 0 + torch.relu(self.fc(x - 1.0))", {"input_mutation"}),
        ("self.__dict__.setdefault('kept', torch.relu(self.fc(x)))", {"caching", "aliasing", "state_leak"}),
        ("self.__dict__.setdefault('kept', torch.empty(64, 128)).copy_(torch.relu(self.fc(x)))", {"aliasing"}),
    ],
)
def test_a_wrong_candidate_is_rejected(evaluator: Evaluator, change: str, reasons: set[str]) -> None:
    candidate = Candidate(source=MODEL.replace("torch.relu(self.fc(x))", change))
    evaluation = evaluator.evaluate(task_from_source(TASK, where="task"), candidate)
    assert evaluation.outcome == "rejected"
    assert evaluation.reason in reasons, evaluation.message


def test_a_crash_leaves_the_device_in_health(evaluator: Evaluator) -> None:
    candidate = Candidate(source=MODEL.replace("return torch.relu", "import os; os.abort()\n        return torch.relu"))
    evaluation = evaluator.evaluate(task_from_source(TASK, where="task"), candidate)
    assert (evaluation.outcome, evaluation.reason) == ("rejected", "crash"), evaluation.message


def test_two_candidates_are_timed_with_each_other_and_profiled(evaluator: Evaluator) -> None:
    quick, slow = (
        Candidate(source=MODEL.replace("return ", f"y = [self.fc(x) for _ in range({count})]\n        return "))
        for count in (300, 900)  # long beside what a turn costs on a busy machine
    )
    task = task_from_source(TASK, where="task")
    evaluation = evaluator.evaluate(task, quick, against=slow, profile=True)
    assert evaluation.outcome == "accepted", evaluation.message
    assert evaluation.measurement is not None
    assert evaluation.measurement.speedup > 1.2
    assert evaluation.profile is not None
    assert "aten::addmm" in {row.name for row in evaluation.profile.rows}
    swapped = evaluator.evaluate(task, quick, against=Candidate(source=MODEL.replace("relu", "sigmoid")))
    assert (swapped.outcome, swapped.reason) == ("unscored", "other_rejected"), swapped.message
