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
from tasks.figures import times
from tasks.records import Candidate
from tasks.redteam import Case, departure, selected
from tasks.reference_source import task_from_source
from tasks.version import EVALUATOR_VERSION, PACKAGE_VERSION


def run(evaluator: Evaluator, folder: Path, case: Case) -> dict[str, Any]:
    """One case's row."""
    began = time.monotonic()
    task = task_from_source((folder / "task.py").read_text(), where=folder.name, precision="fp32")
    for name in (*case.get("before", ()), "candidate.py"):
        found = evaluator.evaluate(task, Candidate(source=(folder / name).read_text()))
    measured = found.measurement
    return {
        "case": case["name"], "family": case["family"], "expect": case["expect"], "expected_reason": case["reason"],
        "outcome": found.outcome, "reason": found.reason, "step": found.step, "labels": found.labels,
        "speedup": measured and measured.speedup, "ci": measured and [measured.ci_low, measured.ci_high],
        "message": found.message, "isolation": found.isolation, "device_type": found.device_type,
        "as_expected": not departure(case, found), "seconds": round(time.monotonic() - began, 2),
        "versions": {"package": PACKAGE_VERSION, "evaluator": EVALUATOR_VERSION},
    }  # fmt: skip


def described(row: dict[str, Any]) -> str:
    """One line of a Markdown table."""
    expected, given = (f"{row['expect']} {row['expected_reason'] or ''}", f"{row['outcome']} {row['reason'] or ''}")
    speed = times(row["speedup"]) if row["speedup"] else ""
    mark = "yes" if row["as_expected"] else "NO"
    return f"| {row['case']} | {expected} | {given} | {speed} | {row['seconds']:.1f} | {mark} |"


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
