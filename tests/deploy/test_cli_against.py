"""`kontrast evaluate --against`: what reaches the evaluator, what is shown, and what does not go together."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import evaluation
from deploy.cli.evaluation import Request, evaluate_batch, evaluate_one
from deploy.cli.panel import print_panel
from tasks.errors import UsageError
from tasks.records import Candidate, Evaluation, Measurement, Task

TASK = """
import torch
from torch import nn
class Model(nn.Module):
    def forward(self, x):
        return x * 2 + x
def get_inputs():
    return [torch.randn(256, 256)]
def get_init_inputs():
    return []
"""
GOOD = """
import torch
from torch import nn
class ModelNew(nn.Module):
    def forward(self, x):
        return x * 3
"""
SLOW = GOOD.replace("return", "y = [x * 3 for _ in range(8)]\n        return")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("task", TASK), ("good", GOOD), ("slow", SLOW), ("wrong", GOOD.replace("3", "4"))):
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def _run(folder: Path, name: str, other: str, *, as_json: bool = True, **options: Any) -> int:
    request = Request(against=str(folder / other), protocol="reward", **options)
    return evaluate_one(
        request, str(folder / "task.py"), str(folder / name), as_json=as_json, make=evaluation.make_judge
    )


def test_a_real_duel_says_in_record_what_the_speedup_is_over(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run(folder, "good.py", "slow.py") == 0
    (line,) = capfd.readouterr().out.splitlines()
    found = Evaluation.from_json(line)
    assert (found.baseline, found.against) == ("candidate", Candidate(source=SLOW).content_hash)
    assert found.measurement is not None
    assert found.measurement.ci_low > 1.5


def test_a_wrong_one_on_either_side_shows_in_the_exit_code(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run(folder, "wrong.py", "good.py", as_json=False) == 1
    assert _run(folder, "good.py", "wrong.py", as_json=False) == 3
    assert "The other candidate was rejected (incorrect)" in " ".join(capfd.readouterr().out.split()).replace("│ ", "")


def test_the_panel_names_the_pair() -> None:
    measured = Measurement(speedup=2.0, ci_low=1.9, ci_high=2.1, reference_ms=2.0, candidate_ms=1.0, pairs=20)
    found = Evaluation(
        outcome="accepted", step="time", measurement=measured, task_id="t", task_hash="0", candidate_hash="0",
        baseline="candidate", against="abcdef" * 10,
    )  # fmt: skip
    stream = io.StringIO()
    print_panel(found, stream)
    shown = stream.getvalue()
    for part in ("accepted  2.00x over the other", "other      2.00 ms a call", "the other candidate (abcdefabcdef)"):
        assert part in shown
    assert "reference  2 ms" not in shown


def test_the_line_that_shows_a_rejection_again_has_the_other_candidate() -> None:
    assert "--against b.py" in Request(against="b.py").reproduce("t.py", "a.py", "00")


@contextmanager
def _never(device: str, settings: dict[str, Any]) -> Iterator[Any]:
    pytest.fail("nothing may be evaluated")
    yield


@pytest.mark.parametrize(
    ("name", "other", "says"),
    [("good.py", "absent.py", "absent.py"), ("good.py", ".", "folder"), ("-", "-", "standard input"),
     ("good.py", "seed:fast", "no seed kernel")],
)  # fmt: skip
def test_an_other_candidate_that_cannot_be_read_is_bad_usage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, other: str, says: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError) as raised:
        evaluate_one(Request(against=other), "task.py", name, as_json=True, make=_never)
    assert says in str(raised.value)


def test_against_and_a_batch_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="--against"):
        evaluate_batch(Request(against="x.py"), "y.jsonl", "", make=_never)


def test_without_against_the_evaluator_is_asked_as_before(folder: Path) -> None:
    asked: list[dict[str, Any]] = []

    class Judge:
        def evaluate(self, task: Task, candidate: Candidate, **options: Any) -> Evaluation:
            asked.append(options)
            return Evaluation(outcome="rejected", reason="crash", step="load", task_id="t", task_hash="0",
                              candidate_hash="0")  # fmt: skip

    @contextmanager
    def make(device: str, settings: dict[str, Any]) -> Iterator[Judge]:
        yield Judge()

    task, good = str(folder / "task.py"), str(folder / "good.py")
    evaluate_one(Request(), task, good, as_json=True, make=make)
    evaluate_one(Request(against=good), task, good, as_json=True, make=make)
    assert asked == [{"seed": None}, {"seed": None, "against": Candidate(source=GOOD, origin="file", detail=good)}]
