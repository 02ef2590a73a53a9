"""`kontrast evaluate --baseline`: what reaches the evaluator, and what is bad usage."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.evaluation import Request, evaluate_batch, evaluate_one
from deploy.cli.panel import print_panel
from tasks.errors import UsageError
from tasks.records import Candidate, Evaluation, Measurement, Task

TASK = "class Model: pass\ndef get_inputs(): return []\ndef get_init_inputs(): return []\n"


class FakeJudge:
    """Remembers its options; the baseline fails where the candidate says so."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def evaluate(self, task: Task, candidate: Candidate, **options: Any) -> Evaluation:
        self.asked.append(options)
        common: dict[str, Any] = {"step": "time", "task_id": "t", "task_hash": "0", "candidate_hash": "0"}
        if "FAILS" in candidate.source:
            return Evaluation(outcome="unscored", reason="baseline_failed", message="It does not compile.", **common)
        measured = Measurement(speedup=2.0, ci_low=1.9, ci_high=2.1, reference_ms=2.0, candidate_ms=1.0, pairs=20)
        baseline = options.get("baseline", "eager")
        return Evaluation(outcome="accepted", measurement=measured, baseline=baseline, **common)


@pytest.fixture
def judge() -> FakeJudge:
    return FakeJudge()


def _make(judge: FakeJudge) -> Any:
    @contextmanager
    def make(device: str, settings: dict[str, Any]) -> Iterator[FakeJudge]:
        yield judge

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "good.py").write_text("class ModelNew: pass\n")
    (tmp_path / "fails.py").write_text("class ModelNew: pass  # FAILS\n")
    return tmp_path


@pytest.mark.parametrize("baseline", ["eager", "compile", "graph"])
def test_the_baseline_reaches_the_evaluator_and_the_panel(
    judge: FakeJudge, folder: Path, capfd: pytest.CaptureFixture[str], baseline: str
) -> None:
    request = Request(device="cuda", baseline=baseline)
    paths = str(folder / "task.py"), str(folder / "good.py")
    assert evaluate_one(request, *paths, as_json=True, make=_make(judge)) == 0
    assert judge.asked[0].get("baseline", "eager") == baseline
    found = Evaluation.from_json(capfd.readouterr().out)
    stream = io.StringIO()
    print_panel(found, stream)
    words = {"eager": "reference  ", "compile": "compiled reference", "graph": "graph of the reference"}
    assert words[baseline] in stream.getvalue()
    assert ("--baseline" in request.reproduce(*paths, "00")) == (baseline != "eager")


def test_a_baseline_that_does_not_work_is_bad_usage_for_one_and_unscored_in_a_batch(
    judge: FakeJudge, folder: Path
) -> None:
    request = Request(baseline="compile")
    with pytest.raises(UsageError, match="It does not compile"):
        evaluate_one(request, str(folder / "task.py"), str(folder / "fails.py"), as_json=True, make=_make(judge))
    lines = [{"id": name, "task": "task.py", "candidate": f"{name}.py"} for name in ("fails", "good")]
    (folder / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = folder / "results.jsonl"
    assert evaluate_batch(request, str(folder / "cases.jsonl"), str(out), make=_make(judge)) == 3
    outcomes = [json.loads(line)["evaluation"]["outcome"] for line in out.read_text().splitlines()]
    assert outcomes == ["unscored", "accepted"]
    assert all(options["baseline"] == "compile" for options in judge.asked)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"baseline": "comiple"}, "did you mean compile?"),
        ({"baseline": "candidate"}, "--baseline candidate is unknown"),
        ({"baseline": "graph"}, "needs a CUDA device"),
        ({"baseline": "compile", "against": "x.py"}, "leave --baseline out"),
    ],
)
def test_a_baseline_that_makes_no_sense_is_bad_usage(options: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        Request(**options)
    assert says in str(raised.value)
