"""The static screen: what can never run is refused, words decide nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from evaluator.judgement import Facts, Rules, judge
from evaluator.judgement.facts import ScreenFacts
from evaluator.screen import MAX_SOURCE_BYTES, screen
from tasks.records import Candidate, Measurement, Task

REFERENCE = '''
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """Linear, then an activation."""

    def __init__(self, width, slope=0.1):
        super(Model, self).__init__()
        self.layer = nn.Linear(width, width)
        self.slope = slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # the hidden state
        hidden = self.layer(x)
        return F.leaky_relu(hidden, self.slope)

def get_inputs():
    return [torch.randn(4, 8)]

def get_init_inputs():
    return [8]
'''
TASK = Task(id="t", source=REFERENCE)
COPY = REFERENCE.replace("Model", "ModelNew")

SAME = {
    "a copy": COPY,
    "other names": COPY.replace("hidden", "h").replace("self.layer", "self.proj").replace("slope", "leak"),
    "another layout": ast.unparse(ast.parse(COPY)),
    "other imports": COPY.replace("import torch.nn.functional as F", "from torch.nn.functional import leaky_relu")
    .replace("F.leaky_relu", "leaky_relu")
    .replace("import torch.nn as nn", "from torch import nn"),
    "an empty subclass of a copy": REFERENCE + "\nclass ModelNew(Model):\n    pass\n",
    "plain super": COPY.replace("super(ModelNew, self)", "super(ModelNew, self)"),
}
OTHER = {
    "another operator": COPY.replace("F.leaky_relu(hidden, self.slope)", "torch.maximum(hidden, hidden * self.slope)"),
    "another constant": COPY.replace("slope=0.1", "slope=0.2"),
    "an extra step": COPY.replace("hidden = self.layer(x)", "hidden = self.layer(x).contiguous()"),
    "swapped arguments": COPY.replace("nn.Linear(width, width)", "nn.Linear(width, slope)"),
    "no class": "ModelNew = None\n",
}


def seen(source: str) -> ScreenFacts:
    return screen(Candidate(source=source), TASK)


@pytest.mark.parametrize("name", SAME)
def test_the_same_formula_is_recognised_under_other_names_and_layouts(name: str) -> None:
    assert seen(SAME[name]).same_formula


@pytest.mark.parametrize("name", OTHER)
def test_another_formula_is_not_the_same(name: str) -> None:
    assert not seen(OTHER[name]).same_formula


def verdict(source: str) -> tuple[str, str | None]:
    measured = Measurement(speedup=2.0, ci_low=1.9, ci_high=2.1, reference_ms=2.0, candidate_ms=1.0, pairs=20)
    found = judge(Facts(step="time", screen=seen(source), measurement=measured), Rules())
    return found.outcome, found.reason


@pytest.mark.parametrize(
    "source", ["def forward(:\n", "x = 1\n", "a" * (MAX_SOURCE_BYTES + 1), "ModelNew = (" + "(" * 5000, "ModelNew\0"]
)
def test_what_can_never_run_breaks_the_contract(source: str) -> None:
    assert verdict(source) == ("rejected", "contract")


def test_a_syntax_error_names_its_line() -> None:
    assert seen("x = 1\ny = = 2\n# ModelNew").syntax_error.startswith("line 2: ")


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_the_text_decides_nothing_else(name: str) -> None:
    assert verdict({**SAME, **OTHER}[name]) == ("accepted", None)


def test_hints_are_advice() -> None:
    source = COPY + "\nimport ctypes, threading\nKERNEL = torch.compile\nclass T(threading.Thread): pass\n"
    assert seen(source).hints == ("compile", "ctypes", "threads")
    assert verdict(source) == ("accepted", None)


class _Rename(ast.NodeTransformer):
    """Renames every local, argument and attribute that the source itself binds, `ModelNew` and methods apart."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(f"renamed_{node.id}", node.ctx) if node.id in self._names else node


def test_renaming_and_reformatting_the_cases_changes_no_screen_verdict(shared_dir: Path) -> None:
    for folder in sorted((shared_dir / "cases" / "redteam").iterdir()):
        if not folder.is_dir():
            continue
        task = Task(id="t", source=(folder / "task.py").read_text())
        text = (folder / "candidate.py").read_text()
        tree = ast.parse(text)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        bound = {name.id for f in functions for name in ast.walk(f) if isinstance(name, ast.Name)
                 and isinstance(name.ctx, ast.Store)}  # fmt: skip
        renamed = ast.unparse(_Rename(bound).visit(tree))
        before, after = screen(Candidate(source=text), task), screen(Candidate(source=renamed), task)
        assert (before.syntax_error, before.names_model, before.too_long) == ("", True, False)
        assert (after.syntax_error, after.names_model, after.too_long) == ("", True, False)
        assert before.same_formula == after.same_formula
