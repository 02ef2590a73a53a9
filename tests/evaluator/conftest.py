"""One evaluator for all tests that go through the processes: the zygote's import of torch is paid once."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from evaluator import Evaluator, EvaluatorConfig
from evaluator.config import Deadlines, TimingConfig
from tasks.records import Task

TASK_SOURCE = textwrap.dedent("""
    import torch
    from torch import nn
    class Model(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.fc = nn.Linear(width, width)
        def forward(self, x):
            return torch.relu(self.fc(x))
    def get_inputs():
        return [torch.randn(64, 128)]
    def get_init_inputs():
        return [128]
""")

QUICK = EvaluatorConfig(
    timing=TimingConfig(half_width=0.2, reward_half_width=0.2, cap_s=1.0, confirm_above=1000.0),
    deadlines=Deadlines(load_s=3.0, warm_s=3.0, call_s=1.5, candidate_s=30.0),
    memory_limit_mib=1024,
)


@pytest.fixture(scope="session")
def task() -> Task:
    return Task(id="file:relu_linear", source=TASK_SOURCE)


@pytest.fixture(scope="session")
def quick() -> EvaluatorConfig:
    return QUICK


@pytest.fixture(scope="session")
def evaluator() -> Iterator[Evaluator]:
    with Evaluator(config=QUICK) as running:
        yield running


@pytest.fixture(scope="session")
def renaming() -> ModuleType:
    """The module `renaming.py` beside this file."""
    spec = importlib.util.spec_from_file_location("renaming", Path(__file__).parent / "renaming.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
