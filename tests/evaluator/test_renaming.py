"""Renaming and reformatting: the same program under another text, and what must keep its name."""

from __future__ import annotations

import ast
from types import ModuleType

import torch

SOURCE = '''
import torch
from torch import nn

LIMIT = 3  # a constant

class Helper:
    def __init__(self, start):
        self.start = start
    def twice(self, value):
        return 2 * value + self.start

def scale(value, factor=LIMIT):
    """Scales."""
    return value * factor

class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.register_buffer("table", torch.ones(1))
        self.calls, self.shift = 0, 0

    def _work(self, x):
        global LIMIT
        return self.fc(x) * self.table

    def forward(self, x):
        self.calls += 1
        try:
            done = [scale(row, factor=2) for row in self._work(x)]
        except ValueError as problem:
            raise problem
        return torch.stack(done) + Helper(self.shift).start
'''


def test_what_is_the_candidates_own_gets_another_name_and_the_rest_keeps_its(renaming: ModuleType) -> None:
    text = renaming.renamed(SOURCE, ["fc"])
    words = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert not words & {"LIMIT", "Helper", "scale", "width", "x", "calls", "shift", "_work", "done", "problem", "row"}
    assert {"torch", "nn", "fc", "table", "start", "ValueError"} <= words
    assert all(word in text for word in ("class ModelNew(nn.Module)", "def forward(", "def __init__(", "factor=2"))
    assert "#" not in text


def test_the_renamed_program_computes_the_same(renaming: ModuleType) -> None:
    results = []
    for text in (SOURCE, renaming.renamed(SOURCE, ["fc"])):
        names: dict[str, object] = {}
        exec(text, names)
        torch.manual_seed(0)
        model = names["ModelNew"](4)  # type: ignore[operator]
        assert set(model.state_dict()) == {"fc.weight", "fc.bias", "table"}
        results.append(model(torch.ones(2, 4)))
    assert torch.equal(*results)
