"""The red-team cases at `$KONTRAST_SHARED/cases/redteam` through the whole evaluator: every verdict as declared there.

One case of each family runs in the ordinary tests, all of them under the marker `redteam`. The evaluator itself never
reads a `case.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from evaluator import Evaluator, EvaluatorConfig
from tasks.records import Candidate, Evaluation, Task
from tasks.redteam import Case, departure, selected

ONE_EACH = (
    "deferred__instance-method-override", "fileenv__tunable-and-scratch-dir", "ipc__leaves-early-with-success",
    "notakernel__always-failing-fast-path", "phase__call-counter", "precision__bf16-inside-fp32",
    "replay__sampled-fingerprint", "resource__orphan-process", "sabotage__library-calls-slowed",
    "shape__in-place-on-input", "tamper__gc-overwrites-expected", "timing__patched-perf-counter",
    "tolerance__positive-inputs-shortcut",
)  # fmt: skip


def _folder() -> Path:
    return Path(os.environ.get("KONTRAST_SHARED", "")) / "cases" / "redteam"


def _cpu_cases() -> list[str]:
    """Names of the cases that need no GPU; empty where the folder is not at hand."""
    if not os.environ.get("KONTRAST_SHARED") or not _folder().is_dir():
        return []
    return [folder.name for folder, _ in selected(_folder(), "cpu")]


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Evaluator]:
    with Evaluator("cpu", EvaluatorConfig()) as running:
        yield running


def _evaluate(
    evaluator: Evaluator, folder: Path, rewrite: Callable[[str, str], str] = lambda source, task: source
) -> tuple[Case, Evaluation]:
    """The case and what is found; `rewrite` makes another text of a candidate, given the task's."""
    case = json.loads((folder / "case.json").read_text())
    task = Task(id="file:case", source=(folder / "task.py").read_text())
    for name in (*case.get("before", ()), "candidate.py"):
        found = evaluator.evaluate(task, Candidate(source=rewrite((folder / name).read_text(), task.source)))
    return case, found


def _assert_as_declared(case: Case, found: Evaluation) -> None:
    departed = departure(case, found)
    assert not departed, departed


def _assert_still_works(evaluator: Evaluator, folder: Path) -> None:
    """After a case that may disturb the evaluator itself: the reference as its own candidate is accepted."""
    source = (folder / "task.py").read_text()
    found = evaluator.evaluate(
        Task(id="file:case", source=source), Candidate(source=source.replace("Model", "ModelNew"))
    )
    assert found.outcome == "accepted", found.message


@pytest.mark.parametrize("name", ONE_EACH)
def test_one_case_of_each_family(evaluator: Evaluator, shared_dir: Path, name: str) -> None:
    _assert_as_declared(*_evaluate(evaluator, shared_dir / "cases" / "redteam" / name))


@pytest.mark.redteam
@pytest.mark.parametrize("name", _cpu_cases() or ["(none at hand)"])
def test_every_case_gets_its_declared_verdict(evaluator: Evaluator, shared_dir: Path, name: str) -> None:
    folder = shared_dir / "cases" / "redteam" / name
    case, found = _evaluate(evaluator, folder)
    _assert_as_declared(case, found)
    if case.get("dangerous"):
        _assert_still_works(evaluator, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", _cpu_cases() or ["(none at hand)"])
def test_renaming_changes_no_declared_verdict(
    evaluator: Evaluator, shared_dir: Path, renaming: ModuleType, name: str
) -> None:
    def rewrite(source: str, task: str) -> str:
        return str(renaming.renamed(source, renaming.state_names(task)))

    _assert_as_declared(*_evaluate(evaluator, shared_dir / "cases" / "redteam" / name, rewrite))


def test_the_evaluator_never_reads_an_expectation() -> None:
    for path in (Path(__file__).resolve().parents[2] / "evaluator").rglob("*.py"):
        assert "case.json" not in path.read_text(), path
