"""The mutation test of the evaluator: turns its defences off one by one and shows what gets through.

    python scripts/mutation_matrix.py --out matrix.jsonl
    python scripts/mutation_matrix.py --defence aliasing --defence nan_masks

A case is one TOML file in the folder of the defence that it is for: a cheat, which must be rejected, or an honest
twin, which must be accepted. Each cheat is judged with all defences on and with its own off. Where another defence
stops it then, that one is turned off as well, and so on, until the cheat gets through; where that other one decides
even with all on, the cheat must be rejected by its own once the others are off. So every row says what the defence
alone does, or which one stands behind it. Twins are judged with all defences on and with theirs off.

Prints a table and writes JSONL; exit code 1 when a defence's removal is noticed by nothing or a case gets another
verdict than declared. Defences that no CPU can show are listed as such.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from evaluator import Evaluator, EvaluatorConfig
from evaluator.config import TimingConfig
from evaluator.judgement.defences import ALL_DEFENCES
from tasks.records import Candidate, Evaluation, Task

CASES = Path(__file__).resolve().parents[1] / "tests" / "evaluator" / "own_cases"
TASKS = "tasks"
NOT_ON_A_CPU = {
    "stream_escape": "device work that runs on beside the next turn; an arm's threads are stopped with it on a CPU",
}
"""Defences whose cheats need an accelerator."""
DEEPEST = 4
"""Defences that are turned off for one cheat, at most."""
CONFIG = EvaluatorConfig(timing=TimingConfig(half_width=0.2, reward_half_width=0.2))


@dataclass(frozen=True)
class Case:
    """One cheat or honest twin."""

    defence: str
    name: str
    task: str
    expect: Literal["accept", "reject"]
    why: str
    source: str
    reason: str = ""
    """Reason of a cheat's rejection."""
    without: str = ""
    """What becomes of a cheat when its defence is off: `accepted`, `unscored`, or the defence that stops it then."""

    @property
    def label(self) -> str:
        """`aliasing/expanded_view`."""
        return f"{self.defence}/{self.name}"


@dataclass(frozen=True)
class Trial:
    """The verdict with some defences off; `by` is the defence that rejected."""

    off: tuple[str, ...]
    outcome: str
    reason: str
    by: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.by})" if self.by else self.outcome

    def like(self, other: Trial) -> bool:
        """Whether both are the same verdict."""
        return str(self) == str(other)


@dataclass(frozen=True)
class Row:
    """One case in the matrix."""

    defence: str
    case: str
    task: str
    expect: str
    trials: tuple[Trial, ...]
    as_declared: bool
    """The verdicts with all defences on and with its own off are the declared ones."""
    noticed: bool
    """Turning the defence off changes the verdict, with the others on or with those off that stop the cheat as well."""

    @property
    def with_all(self) -> Trial:
        return self.trials[0]


def load_cases(folder: Path = CASES) -> list[Case]:
    """All cases, sorted by task, since a task's reference stays warm; raises KeyError or TypeError for a bad file."""
    cases = []
    for path in folder.glob("*/*.toml"):
        fields: dict[str, Any] = tomllib.loads(path.read_text())
        cases.append(Case(defence=path.parent.name, name=path.stem, **fields))
    return sorted(cases, key=lambda case: (case.task, case.label))


class Matrix:
    """Judges cases with defences on and off, on one running evaluator whose configuration it changes."""

    def __init__(self, evaluator: Evaluator, folder: Path = CASES) -> None:
        self._evaluator = evaluator
        self._folder = folder

    def evaluate(self, case: Case, off: Sequence[str] = (), source: str | None = None) -> Evaluation:
        """The evaluation of a case with some defences off; `source` stands in for the case's own."""
        self._evaluator.config = self._evaluator.config.model_copy(update={"defences_off": tuple(off)})
        text = (self._folder / TASKS / f"{case.task}.py").read_text()
        return self._evaluator.evaluate(
            Task(id=f"file:{case.task}", source=text), Candidate(source=case.source if source is None else source)
        )

    def trial(self, case: Case, off: Sequence[str] = ()) -> Trial:
        """The verdict in short."""
        found = self.evaluate(case, off)
        by = str(found.detail.get("defence", "")) if found.outcome == "rejected" else ""
        return Trial(tuple(off), found.outcome, found.reason or "", by)

    def row(self, case: Case) -> Row:
        """All trials of one case."""
        trials = self._twin(case) if case.expect == "accept" else self._cheat(case)
        first = trials[0]
        if case.expect == "accept":
            as_declared, noticed = all(trial.outcome == "accepted" for trial in trials), False
        else:
            as_declared = first.reason == case.reason and (trials[1].by or trials[1].outcome) == case.without
            decides = not trials[1].like(first) or any(trial.by == case.defence for trial in trials)
            noticed = as_declared and decides and trials[-1].outcome != "rejected"
        return Row(case.defence, case.label, case.task, case.expect, tuple(trials), as_declared, noticed)

    def _twin(self, case: Case) -> list[Trial]:
        return [self.trial(case), self.trial(case, [case.defence])]

    def _cheat(self, case: Case) -> list[Trial]:
        """All on, its own off, one more off at a time; where others decide before it, those off and its own on.

        The last trial is the one in which the cheat gets through.
        """
        first = self.trial(case)
        trials = [first]
        off = [case.defence]
        while (seen := self.trial(case, off)).outcome == "rejected" and len(off) < DEEPEST and seen.by in ALL_DEFENCES:
            trials.append(seen)
            off.append(seen.by)
        if first.by != case.defence and len(off) > 1:
            trials.append(self.trial(case, off[1:]))
        return [*trials, seen]


def rows(matrix: Matrix, cases: Sequence[Case]) -> Iterator[Row]:
    """One row a case."""
    for case in cases:
        yield matrix.row(case)


def unnoticed(found: Sequence[Row], defences: Sequence[str]) -> list[str]:
    """Defences without a cheat that shows what they are for."""
    noticed = {row.defence for row in found if row.noticed}
    return [name for name in defences if name not in noticed and name not in NOT_ON_A_CPU]


def evidence(cases: Sequence[Case], defence: str) -> str:
    """The cell of a defence in the table of the evaluator's README: its cheats, and what stops them without it."""
    if defence in NOT_ON_A_CPU:
        return "none on a CPU"
    cheats = sorted((case for case in cases if case.defence == defence and case.reason), key=lambda case: case.name)
    words = {"accepted": "", "unscored": ", then unscored"}
    return "; ".join(f"`{case.name}`{words.get(case.without, f', then `{case.without}`')}" for case in cheats)


def table(found: Sequence[Row], defences: Sequence[str]) -> str:
    """The matrix as text, by defence."""
    lines = [f"{'defence':<19} {'case':<24} {'all on':<40} {'its own off':<40} then"]
    for name in defences:
        if name in NOT_ON_A_CPU:
            lines.append(f"{name:<19} only on an accelerator: {NOT_ON_A_CPU[name]}")
        for row in (row for row in found if row.defence == name):
            short = row.case.partition("/")[2]
            flag = "" if row.as_declared and (row.noticed or row.expect == "accept") else "  <- WRONG"
            lines.append(
                f"{name:<19} {short:<24} {row.with_all!s:<40} {row.trials[1]!s:<40} {_rest(row)}{flag}".rstrip()
            )
    return "\n".join(lines)


def _rest(row: Row) -> str:
    """The trials with more than the own defence off."""
    return "; ".join(f"without {' and '.join(trial.off)}: {trial}" for trial in row.trials[2:])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--defence", action="append", choices=ALL_DEFENCES, help="only this defence; may be repeated")
    parser.add_argument("--out", type=Path, help="JSONL file for the rows")
    arguments = parser.parse_args()
    defences = arguments.defence or list(ALL_DEFENCES)
    found: list[Row] = []
    with Evaluator("cpu", CONFIG) as evaluator:
        for row in rows(Matrix(evaluator), [case for case in load_cases() if case.defence in defences]):
            found.append(row)
            print(f"{row.case}: {' | '.join(str(trial) for trial in row.trials)}", file=sys.stderr, flush=True)
    print(table(found, defences))
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(asdict(row)) + "\n" for row in found))
    missing, wrong = unnoticed(found, defences), [row.case for row in found if not row.as_declared]
    if missing:
        print(f"Nothing notices that these defences are off: {', '.join(missing)}.", file=sys.stderr)
    if wrong:
        print(f"Not the declared verdict: {', '.join(wrong)}.", file=sys.stderr)
    return 1 if missing or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
