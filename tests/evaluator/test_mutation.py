"""Every defence is needed, and no honest candidate suffers from any: the evaluator judged with defences off.

The cases lie in `own_cases/<defence>/<name>.toml`; `scripts/mutation_matrix.py` turns the defences off. Some rows run
in the ordinary tests, the whole matrix under the marker `slow`. Verdicts must also survive a renaming
of everything that a candidate defines.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from evaluator import Evaluator
from evaluator.config import SandboxConfig
from evaluator.judgement.defences import ALL_DEFENCES
from tasks.records.evaluation import REJECTION_REASONS

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("mutation_matrix", ROOT / "scripts" / "mutation_matrix.py")
assert _spec is not None
assert _spec.loader is not None
matrix = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = matrix
_spec.loader.exec_module(matrix)
CASES: dict[str, Any] = {case.label: case for case in matrix.load_cases()}
CHEATS = [label for label, case in CASES.items() if case.expect == "reject"]
TWINS = [label for label, case in CASES.items() if case.expect == "accept"]
QUICK = (
    "aliasing/expanded_view", "aliasing/transposed_layout", "channel_schema/forged_message",
    "determinism/carries_over", "parameter_tracking/merged_once", "stale_result/every_third_call",
)  # fmt: skip
"""One row of each kind: a fault of its own, a twin, an end without a verdict, a second line, two active parts."""


@pytest.fixture(scope="module")
def judged() -> Iterator[Any]:
    with Evaluator("cpu", matrix.CONFIG) as running:
        yield matrix.Matrix(running)


def test_every_defence_has_a_cheat_and_an_honest_twin_or_needs_an_accelerator() -> None:
    on_a_cpu = set(ALL_DEFENCES) - set(matrix.NOT_ON_A_CPU)
    assert {CASES[label].defence for label in CHEATS} == on_a_cpu
    assert {CASES[label].defence for label in TWINS} == on_a_cpu
    assert set(matrix.NOT_ON_A_CPU) <= set(ALL_DEFENCES)


@pytest.mark.parametrize("label", CASES)
def test_a_case_is_complete(label: str) -> None:
    case = CASES[label]
    assert (matrix.CASES / matrix.TASKS / f"{case.task}.py").is_file()
    assert case.why.endswith(".")
    assert (case.expect, bool(case.reason), bool(case.without)) in {("reject", True, True), ("accept", False, False)}
    assert case.reason in {"", *REJECTION_REASONS}
    assert case.without in {"", "accepted", "unscored", *ALL_DEFENCES} - {case.defence}


@pytest.mark.parametrize("defence", ALL_DEFENCES)
def test_the_readme_names_each_cheat_and_what_stops_it_else(defence: str) -> None:
    lines = (ROOT / "evaluator" / "README.md").read_text().splitlines()
    row = next(line for line in lines if f"| `{defence}` |" in line)
    assert row.split("|")[5].strip() == matrix.evidence(list(CASES.values()), defence)


def assert_as_declared(row: Any) -> None:
    seen = " | ".join(str(trial) for trial in row.trials)
    assert row.as_declared, seen
    assert row.noticed or row.expect == "accept", seen


@pytest.mark.parametrize("label", QUICK)
def test_a_row_of_the_matrix(judged: Any, label: str) -> None:
    assert_as_declared(judged.row(CASES[label]))


@pytest.mark.slow
@pytest.mark.parametrize("label", CASES)
def test_every_row_of_the_matrix(judged: Any, label: str) -> None:
    assert_as_declared(judged.row(CASES[label]))


def test_a_helper_process_is_seen_where_no_namespace_keeps_it() -> None:
    sandbox = SandboxConfig(layers=("landlock", "seccomp"))
    with Evaluator("cpu", matrix.CONFIG.model_copy(update={"sandbox": sandbox})) as running:
        found = matrix.Matrix(running).evaluate(CASES["pending_work/helper_process"])
    assert (found.outcome, found.reason) == ("rejected", "resource_abuse"), found.message


def assert_renaming_changes_nothing(judged: Any, renaming: ModuleType, label: str) -> None:
    case = CASES[label]
    task = (matrix.CASES / matrix.TASKS / f"{case.task}.py").read_text()
    text = renaming.renamed(case.source, renaming.state_names(task))
    assert text != case.source
    found = judged.evaluate(case, source=text)
    assert (found.outcome, found.reason or "") == (f"{case.expect}ed", case.reason), found.message


@pytest.mark.parametrize("label", [label for label in CHEATS if CASES[label].task in ("linear_relu", "row_mean")])
def test_renaming_changes_no_verdict(judged: Any, renaming: ModuleType, label: str) -> None:
    assert_renaming_changes_nothing(judged, renaming, label)


@pytest.mark.slow
@pytest.mark.parametrize("label", CASES)
def test_renaming_changes_no_verdict_of_all(judged: Any, renaming: ModuleType, label: str) -> None:
    assert_renaming_changes_nothing(judged, renaming, label)


class Scripted(matrix.Matrix):  # type: ignore[name-defined, misc]
    """Cheats that are stopped by the first of some defences that is on."""

    def __init__(self, *stoppers: str) -> None:
        self._stoppers = stoppers

    def trial(self, case: Any, off: Sequence[str] = ()) -> Any:
        by = next((name for name in self._stoppers if name not in off), "")
        return matrix.Trial(tuple(off), "rejected" if by else "accepted", "incorrect" if by else "", by)


def scripted_row(*stoppers: str, without: str = "accepted") -> Any:
    """The row of a cheat of `aliasing` that these defences stop, in this order."""
    case = matrix.Case("aliasing", "view", "row_mean", "reject", "A cheat.", "", "incorrect", without)
    return Scripted(*stoppers).row(case)


def trials(row: Any) -> list[tuple[tuple[str, ...], str]]:
    return [(trial.off, trial.by or trial.outcome) for trial in row.trials]


def test_a_cheat_that_one_defence_stops_gets_through_without_it() -> None:
    row = scripted_row("aliasing")
    assert trials(row) == [((), "aliasing"), (("aliasing",), "accepted")]
    assert (row.as_declared, row.noticed) == (True, True)


def test_a_defence_that_stands_behind_is_turned_off_as_well() -> None:
    row = scripted_row("aliasing", "output_type", "nan_masks", without="output_type")
    assert trials(row)[1:] == [
        (("aliasing",), "output_type"),
        (("aliasing", "output_type"), "nan_masks"),
        (("aliasing", "output_type", "nan_masks"), "accepted"),
    ]
    assert (row.as_declared, row.noticed) == (True, True)


def test_a_second_line_has_to_decide_once_the_first_is_off() -> None:
    row = scripted_row("error_budget", "aliasing", without="error_budget")
    assert (("error_budget",), "aliasing") in trials(row)
    assert (row.as_declared, row.noticed) == (True, True)
    idle = scripted_row("error_budget", without="error_budget")
    assert (("error_budget",), "accepted") in trials(idle)
    assert (idle.as_declared, idle.noticed) == (True, False)


def test_a_removal_that_nothing_notices_is_named_and_marked() -> None:
    idle, missed = scripted_row("error_budget", without="error_budget"), scripted_row()
    assert not missed.as_declared
    for rows in ([idle], [missed], []):
        assert matrix.unnoticed(rows, ["aliasing", "stream_escape"]) == ["aliasing"]
    assert matrix.unnoticed([idle, scripted_row("aliasing")], ["aliasing"]) == []
    text = matrix.table([idle, scripted_row("aliasing")], ["aliasing", "stream_escape"])
    assert text.count("WRONG") == 1
    assert "only on an accelerator" in text
