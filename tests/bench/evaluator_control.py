"""The reference against itself through the whole path: what the evaluator says about a ratio that is known.

    python tests/bench/evaluator_control.py [TASK ...] [--repeats 6] [--device cpu] [--out FILE.jsonl]

Each repeat is an evaluator of its own, so that nothing is shared but the machine. Prints for each task the root mean
square of the log ratios (the error of a single evaluation), the mean (the bias), the mean half-width of the intervals,
and how many of them miss 1. Nominal 98 % intervals miss two in a hundred.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from evaluator import Evaluator
from tasks.records import Task
from tasks.suites import load_task

TASKS = ("procedural:row_norm/1", "procedural:elementwise/3", "procedural:pooling/2", "procedural:structured_matmul/1")


def run(task: Task, device: str) -> dict[str, Any]:
    with Evaluator(device) as evaluator:
        found = evaluator.control(task)
    measured = found.measurement
    if measured is None:
        raise SystemExit(f"{task.id} against itself was {found.outcome}: {found.message}")
    return {
        "task": task.id, "log": math.log(measured.speedup), "low": math.log(measured.ci_low),
        "high": math.log(measured.ci_high), "pairs": measured.pairs, "stopped": measured.stopped,
        "reference_ms": measured.reference_ms, "time_s": found.seconds_by_step["time"],
        "device_type": found.device_type,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> None:
    print(f"{'task':<32}{'ms':>8}{'runs':>6}{'rms':>8}{'bias':>9}{'half-width':>12}{'misses':>8}")
    for name in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == name]
        logs = [row["log"] for row in own]
        rms, half = math.hypot(*logs) / math.sqrt(len(logs)), statistics.mean((r["high"] - r["low"]) / 2 for r in own)
        misses = sum(not row["low"] <= 0 <= row["high"] for row in own)
        middle = statistics.median(row["reference_ms"] for row in own)
        print(f"{name:<32}{middle:>8.3f}{len(own):>6}{rms:>8.4f}{statistics.mean(logs):>+9.4f}{half:>12.4f}{misses:>8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    size = "cpu" if given.device == "cpu" else "gpu"
    tasks = [load_task(name, size=size) for name in given.tasks or TASKS]
    rows = []
    for _ in range(given.repeats):
        for task in tasks:
            rows.append(run(task, given.device))
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    table(rows)


if __name__ == "__main__":
    main()
