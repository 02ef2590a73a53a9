"""A candidate that puts itself in the place of its worker's code: what it says about its time is not paid."""

from __future__ import annotations

import pytest

from evaluator import Evaluator
from tasks.records import Candidate, Task

TASK = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
    def forward(self, x):
        return torch.relu(self.fc(x))
def get_inputs():
    return [torch.randn(16, 64)]
def get_init_inputs():
    return [64]
"""
CANDIDATE = """
import sys
import torch
from torch import nn

CLAIMED_NS = 0  # set by the test

def take_over(handlers, worker, model):
    inner, attach = handlers["run"], handlers["map"]
    row, views = [], {}

    def view(arena, offset):
        place = arena.start + offset
        if place not in views:
            views[place] = arena.flat(offset, 16 * 64, torch.float32).view(16, 64)
        return views[place]

    def run(calls, **others):
        if others["hold"] or len(calls) < 2 or not row:
            answer = inner(calls=calls, **others)
            row[:] = [{**answer["results"][0], "aliases": []}]
            return answer
        with torch.no_grad():
            for call in calls:
                x = view(worker._inputs, call["specs"][0][3])
                y = view(worker._outputs, call["slots"][0][0])
                torch.addmm(model.fc.bias, x, model.fc.weight.t(), out=y).clamp_min_(0)
        stamps = [number * CLAIMED_NS for number in range(len(calls) + 1)]
        return {"op": "ran", "stamps": stamps, "launch_ns": 0, "results": row * len(calls)}

    def mapped(**others):
        views.clear()
        return attach(**others)

    handlers.update(run=run, map=mapped)


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.tried = False

    def forward(self, x):
        frame = None if self.tried else sys._getframe()
        self.tried = True
        while frame is not None:
            if {"handlers", "worker"} <= set(frame.f_locals):
                take_over(frame.f_locals["handlers"], frame.f_locals["worker"], self)
            frame = frame.f_back
        return torch.relu(self.fc(x))
"""


@pytest.mark.parametrize("claimed_ns", [100, 1000, 3000])
def test_work_hidden_in_the_overhead_that_it_spares_is_not_paid(evaluator: Evaluator, claimed_ns: int) -> None:
    """It reads inputs and writes results in place, without the worker's own steps, and claims any time at all."""
    source = CANDIDATE.replace("CLAIMED_NS = 0", f"CLAIMED_NS = {claimed_ns}")
    result = evaluator.evaluate(Task(id="file:small", source=TASK), Candidate(source=source))
    assert result.facts["timers"]["native_log"] > 0.5, result.message
    if result.outcome == "accepted":
        assert result.measurement is not None
        assert result.measurement.speedup < 1.1
        assert "span_limited" in result.labels
    else:
        assert result.reason in ("forged_result", "timing_escape")
