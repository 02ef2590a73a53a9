"""How many candidates an hour one device judges, and how much of that is exclusive time.

    python tests/bench/evaluator_throughput.py [FILE.jsonl] [--device cpu] [--protocol sequential] [--evaluators 1]
                                               [--minutes 4] [--cache empty|primed] [--out ROWS.jsonl]

FILE has a task and a candidate a line: `ref_code` and `custom_code` as in CUDA-L1's release, or `task` and `candidate`;
without one, seed kernels of procedural tasks are judged. Each evaluation gets a source of its own (a comment with a
number, in each C++ source as well, so that with `--cache empty` nothing is built before it is asked for). With several
evaluators, preparing goes on beside a timing and the device's lock keeps timings apart. The first and the last minute
are left out; `--minutes 0` judges every line once and counts them all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from evaluator import Evaluator, EvaluatorConfig
from tasks.procedural import seed_kernels
from tasks.records import Candidate, Task
from tasks.reference_source import task_from_source
from tasks.suites import load_task

EDGE_S = 60.0
PROCEDURAL = ("row_norm/1", "row_norm/5", "pooling/2", "structured_matmul/1", "elementwise/3")
Line = tuple[str, Task, str]


def lines_of(file: Path | None, size: Any) -> list[Line]:
    """Name, task and candidate source of each line."""
    if file is None:
        tasks = [load_task(f"procedural:{name}", size=size) for name in PROCEDURAL]
        return [(f"{task.id} {seed.name}", task, seed.source) for task in tasks for seed in seed_kernels(task)]
    lines = []
    for number, text in enumerate(file.read_text().splitlines(), 1):
        row = json.loads(text)
        task = task_from_source(row.get("ref_code") or row["task"], where=f"{file.name}:{number}")
        name = f"{row['level_id']}/{row['task_id']}" if "level_id" in row else str(row.get("id", number))
        lines.append((name, task, row.get("custom_code") or row["candidate"]))
    return lines


def salted(source: str, salt: int, builds: bool) -> str:
    """The same kernel in a text that nobody has seen."""
    if builds:
        source = source.replace("#include", f"/* {salt} */ #include", 1)
    return f"{source}\n# {salt}\n"


def work(device: str, config: EvaluatorConfig, jobs: Any, rows: Any) -> None:
    """Judges jobs until there is none."""
    with Evaluator(device, config) as evaluator:
        while (job := jobs.get()) is not None:
            name, task, source = job
            begin = time.monotonic()
            found = evaluator.evaluate(task, Candidate(source=source))
            measured = found.measurement
            rows.put({
                "candidate": name, "outcome": found.outcome, "reason": found.reason, "begin": begin,
                "end": time.monotonic(), "by_step": found.seconds_by_step, "message": found.message,
                "reference_ms": measured and measured.reference_ms, "speedup": measured and measured.speedup,
                "ci": measured and [measured.ci_low, measured.ci_high], "stopped": measured and measured.stopped,
            })  # fmt: skip
    rows.put(None)


def judged(lines: list[Line], given: argparse.Namespace, config: EvaluatorConfig, minutes: float) -> list[Any]:
    """Rows of all evaluations, salted anew in each round."""
    context = multiprocessing.get_context("spawn")
    jobs, rows = context.Queue(given.evaluators), context.Queue()
    arguments = (given.device, config, jobs, rows)
    workers = [context.Process(target=work, args=arguments) for _ in range(given.evaluators)]
    for worker in workers:
        worker.start()
    rng, deadline = random.Random(given.seed), time.monotonic() + 60 * minutes
    for number, line in enumerate(endless(lines) if minutes else lines):
        if minutes and time.monotonic() > deadline:
            break
        name, task, source = line
        salt = number if given.cache == "primed" else rng.getrandbits(48)
        job = (name, task, salted(source, salt, builds=given.cache == "empty"))
        while True:
            try:
                jobs.put(job, timeout=1.0)
                break
            except queue.Full:
                if not any(worker.is_alive() for worker in workers):
                    raise SystemExit("every evaluator died") from None
    for _ in workers:
        jobs.put(None)
    found, ended = [], 0
    while ended < len(workers):
        row = rows.get()
        ended += row is None
        found += [] if row is None else [row]
    return found


def endless(lines: list[Line]) -> Any:
    while True:
        yield from lines


def table(rows: list[dict[str, Any]], whole: bool) -> None:
    first, last = min(row["begin"] for row in rows), max(row["end"] for row in rows)
    edge = 0.0 if whole else EDGE_S
    inside = [row for row in rows if first + edge <= row["end"] <= last - edge]
    if not inside:
        raise SystemExit("nothing is left between the first and the last minute: give more --minutes")
    hours = (last - first - 2 * edge) / 3600
    exclusive = [sum(row["by_step"].get(step, 0.0) for step in ("time", "confirm")) for row in inside]
    short = [
        spent for spent, row in zip(exclusive, inside, strict=True)
        if row["outcome"] == "accepted" and row["reference_ms"] < 10
    ]  # fmt: skip
    print(f"candidates an hour            {len(inside) / hours:>10.0f}   ({len(inside)} in {3600 * hours:.0f} s)")
    print(f"exclusive share of the time   {sum(exclusive) / (3600 * hours):>10.2f}")
    if short:
        print(f"exclusive s per accepted one  {statistics.median(short):>10.2f}   (median, references below 10 ms)")
    for step in sorted({step for row in inside for step in row["by_step"]}):
        spent = [row["by_step"].get(step, 0.0) for row in inside]
        print(f"  {step:<28}{statistics.mean(spent):>10.3f}   s a candidate")
    for (outcome, reason), count in Counter((row["outcome"], row["reason"] or "") for row in inside).most_common():
        print(f"  {outcome} {reason:<24}{count:>10}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--protocol", choices=("sequential", "reward", "paper"), default="sequential")
    parser.add_argument("--rules", choices=("strict", "paper", "any"), default="strict")
    parser.add_argument("--evaluators", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--cache", choices=("empty", "primed"), default="empty")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lines = lines_of(given.file, "cpu" if given.device == "cpu" else "gpu")
    with tempfile.TemporaryDirectory(prefix="kontrast-bench-") as cache:
        config = EvaluatorConfig.model_validate(
            {"protocol": given.protocol, "rules": given.rules, "compile": {"cache_dir": cache}}
        )
        if given.cache == "primed":
            judged(lines, given, config, 0.0)
        rows = judged(lines, given, config, given.minutes)
    if given.out:
        given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{given.file or 'seed kernels'} on {given.device}, {given.protocol}, {given.evaluators} evaluator(s), "
          f"cache {given.cache}")  # fmt: skip
    table(rows, whole=not given.minutes)


if __name__ == "__main__":
    main()
