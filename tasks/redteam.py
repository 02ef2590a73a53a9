"""Cases with a declared verdict, a folder each: cheats that an evaluator must refuse, and honest twins.

A folder holds `task.py`, `candidate.py` and `case.json`, with `expect` (`accept` or `reject`), `reason` and `also_ok`
(the reasons of a rejection that are right), `needs` (what it runs on), and where they matter `neutral_speedup_max` (an
acceptance up to this speedup is as good as a rejection: nothing was paid) and `ci_low_max`.

Invariant: for whoever checks an evaluator; the evaluator itself never reads an expectation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.records import Evaluation

Case = Mapping[str, Any]
"""A `case.json` as read."""


def selected(folder: Path, device: str) -> list[tuple[Path, Case]]:
    """The cases under a folder, by name: on `cpu` those that need only that, on another device the others."""
    found = []
    for path in sorted(folder.glob("*/case.json")):
        case = json.loads(path.read_text())
        needs = case["needs"] if isinstance(case["needs"], list) else [case["needs"]]
        if (needs == ["cpu"]) == (device == "cpu"):
            found.append((path.parent, case))
    return found


def departure(case: Case, found: Evaluation) -> str:
    """How an evaluation departs from the declared verdict, in words; empty for one that is as declared."""
    seen = f"{found.outcome} {found.reason or ''}".strip()
    speedup = found.measurement.speedup if found.measurement is not None else 0.0
    if case["expect"] == "accept":
        if found.outcome != "accepted":
            return f"to be accepted, is {seen}: {found.message}"
    elif found.outcome == "accepted":
        if speedup > float(case.get("neutral_speedup_max") or 0.0):
            return f"to be rejected, is accepted at {speedup:.3g}: {found.message}"
    elif found.outcome != "rejected" or found.reason not in (case["reason"], *(case.get("also_ok") or ())):
        return f"to be rejected as {case['reason']}, is {seen}: {found.message}"
    most = case.get("ci_low_max")
    if most is not None and found.measurement is not None and found.measurement.ci_low > float(most):
        return f"an interval to begin at {most} at most, begins at {found.measurement.ci_low:.3g}"
    return ""
