"""Every red-team case that a device can run, its expected verdict and the one it gets: a table and JSONL.

    python scripts/redteam_table.py OUT.jsonl [--cases FOLDER] [--device cpu]

FOLDER (default `$KONTRAST_SHARED/cases/redteam`) holds one folder a case with `case.json`, `task.py` and
`candidate.py`. On a CPU the cases that need only that are run, on a CUDA device the others. Exits 1 when a verdict is
not the expected one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evaluator import Evaluator
from tasks.records import Candidate, Evaluation
from tasks.reference_source import task_from_source
from tasks.version import EVALUATOR_VERSION, PACKAGE_VERSION


def as_expected(case: dict[str, Any], found: Evaluation) -> bool:
    """A case to be accepted is; one to be rejected is so for a listed reason, or gains no more than what is neutral."""
    speedup = found.measurement.speedup if found.measurement else 0.0
    if case["expect"] == "accept":
        return found.outcome == "accepted"
    if found.outcome == "accepted":
        return speedup <= float(case.get("neutral_speedup_max") or 0.0)
    return found.outcome == "rejected" and found.reason in (case["reason"], *case["also_ok"])


def run(evaluator: Evaluator, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """One case's row."""
    began = time.monotonic()
    task = task_from_source((folder / "task.py").read_text(), where=folder.name, precision="fp32")
    found = evaluator.evaluate(task, Candidate(source=(folder / "candidate.py").read_text()))
    measured = found.measurement
    return {
        "case": case["name"], "family": case["family"], "expect": case["expect"], "expected_reason": case["reason"],
        "outcome": found.outcome, "reason": found.reason, "step": found.step, "labels": found.labels,
        "speedup": measured and measured.speedup, "ci": measured and [measured.ci_low, measured.ci_high],
        "message": found.message, "isolation": found.isolation, "device_type": found.device_type,
        "as_expected": as_expected(case, found), "seconds": round(time.monotonic() - began, 2),
        "versions": {"package": PACKAGE_VERSION, "evaluator": EVALUATOR_VERSION},
    }  # fmt: skip


def described(row: dict[str, Any]) -> str:
    """One line of a Markdown table."""
    expected, given = (f"{row['expect']} {row['expected_reason'] or ''}", f"{row['outcome']} {row['reason'] or ''}")
    speed = f"{row['speedup']:.2f}x" if row["speedup"] else ""
    mark = "yes" if row["as_expected"] else "NO"
    return f"| {row['case']} | {expected} | {given} | {speed} | {row['seconds']:.1f} | {mark} |"


def selected(cases: Path, device: str) -> list[tuple[Path, dict[str, Any]]]:
    found = []
    for path in sorted(cases.glob("*/case.json")):
        case = json.loads(path.read_text())
        needs = case["needs"] if isinstance(case["needs"], list) else [case["needs"]]
        if (needs == ["cpu"]) == (device == "cpu"):
            found.append((path.parent, case))
    return found


def main() -> int:
    """Runs the cases; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--cases", type=Path, default=Path(os.environ.get("KONTRAST_SHARED", ".")) / "cases" / "redteam"
    )
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    cases = selected(given.cases, given.device)
    if not cases:
        parser.error(f"no case under {given.cases}: set KONTRAST_SHARED or name the folder with --cases")
    rows = []
    with Evaluator(given.device) as evaluator, given.out.open("w") as file:
        for folder, case in cases:
            rows.append(run(evaluator, folder, case))
            file.write(json.dumps(rows[-1]) + "\n")
            print(described(rows[-1]), flush=True)
    right = sum(row["as_expected"] for row in rows)
    print(f"{right} of {len(rows)} as expected, {sum(row['seconds'] for row in rows):.0f} s")
    return 0 if right == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
