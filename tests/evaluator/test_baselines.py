"""The reference run in other ways as what a candidate is timed against."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from evaluator import Evaluator, EvaluatorConfig
from evaluator.baselines import baseline_of, rival
from evaluator.compile import discover
from evaluator.config import TimingConfig
from tasks.errors import UsageError
from tasks.records import Candidate, Evaluation, Task

RIGHT = Candidate(
    source="""
import torch
from torch import nn
class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
    def forward(self, x):
        return self.fc(x).clamp_min_(0)
"""
)
COMPILED = Candidate(
    source=RIGHT.source.replace("nn.Linear(width, width)", "nn.Linear(width, width)\n        self.compile()")
)
CONFIG = EvaluatorConfig(timing=TimingConfig(half_width=0.2, cap_s=1.0, confirm_above=1000.0))

needs_compiler = pytest.mark.skipif(not discover().cxx, reason="no C++ compiler on this machine")


@needs_compiler
def test_the_compiled_reference_is_what_the_speedup_is_over(task: Task) -> None:
    with Evaluator(config=CONFIG) as evaluator:
        result = evaluator.evaluate(task, RIGHT, baseline="compile")
        cheat = evaluator.evaluate(task, COMPILED, baseline="compile")
    assert result.outcome == "accepted", result.message
    assert (result.baseline, result.against) == ("compile", "")
    assert "the reference under torch.compile" in result.message
    assert "compiler_wrapper" not in result.labels
    assert Evaluation.from_json(result.to_json()) == result
    assert (cheat.outcome, cheat.reason) == ("rejected", "fallback"), cheat.message


def test_a_reference_that_does_not_compile_is_no_fault_of_the_candidate(evaluator: Evaluator, task: Task) -> None:
    broken = Task(id="file:no_compile", source=task.source.replace(
        "def get_inputs", "def _no(*a): raise ValueError('not today')\nModel.compile = _no\ndef get_inputs"
    ))  # fmt: skip
    result = evaluator.evaluate(broken, RIGHT, baseline="compile")
    assert (result.outcome, result.reason) == ("unscored", "baseline_failed"), result.message
    assert "not today" in result.message
    assert result.message.endswith("Use --baseline eager.")


def test_a_graph_needs_a_cuda_device(evaluator: Evaluator, task: Task) -> None:
    with pytest.raises(UsageError, match="needs a CUDA device"):
        evaluator.evaluate(task, RIGHT, baseline="graph")


def test_compiling_on_a_cpu_needs_a_compiler(evaluator: Evaluator, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "toolchain", lambda: dataclasses.replace(discover(), cxx=""))
    with pytest.raises(UsageError, match="install g\\+\\+"):
        evaluator.evaluate(task, RIGHT, baseline="compile")


def test_baselines_are_the_reference_and_parse(task: Task) -> None:
    for kind in ("compile", "graph"):
        made = baseline_of(task, kind)
        assert made.candidate.source.startswith(task.source)
        assert ast.parse(made.candidate.source)
        assert made.failed == "baseline_failed"
    assert rival(RIGHT).rule == {}


def test_the_graph_copies_inputs_in_and_results_out_and_leaves_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a capture that runs and a replay that runs the same formula on the kept inputs again."""
    source = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x, factor, more):
        self.calls += 1
        return {"a": x * factor, "b": (more[0] + 1, 3)}
def get_inputs(): return []
def get_init_inputs(): return []
"""
    namespace: dict[str, Any] = {}
    exec(baseline_of(Task(id="file:x", source=source), "graph").candidate.source, namespace)
    graphs: list[Any] = []

    class Graph:
        replayed = 0

        def replay(self) -> None:
            self.replayed += 1

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    @contextmanager
    def within(thing: Any) -> Iterator[None]:
        graphs.append(thing)
        yield

    for name, value in (("Stream", Stream), ("current_stream", Stream), ("CUDAGraph", Graph), ("graph", within),
                        ("stream", within)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    model = namespace["ModelNew"]()
    ones = torch.ones(2)
    first = model(ones, 2, [ones])
    assert model.calls == 0
    second = model(ones * 5, 2, [ones])
    graph, kept, _ = model._replay
    assert graph.replayed == 2
    assert torch.equal(kept[0], ones * 5)
    assert kept[0].data_ptr() != ones.data_ptr()
    assert torch.equal(first["a"], ones * 2)
    assert first["b"][1] == 3
    assert first["a"].data_ptr() != second["a"].data_ptr()
