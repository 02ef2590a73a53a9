"""Measures seed kernels against their references on this machine, one thread, in paired bursts.

    python scripts/seed_speeds.py --size cpu --tasks 3 --out seed_speeds.jsonl [FAMILY ...]

For choosing seeds and their speed classes, not for scoring: trusted code in one process, without the evaluator. Prints
one row per family, template and class with the median speedup over tasks; the JSONL has one line per seed and task.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.procedural import TRAINING_FAMILIES, generate, seed_kernels
from tasks.procedural.seeding import SPEEDS

CALLS = 4
"""Calls of one burst; the first is dropped, since it is the noisy one."""


def namespace(source: str, name: str) -> dict[str, Any]:
    """Runs one module's source, from a file where Triton needs to read it again."""
    import tempfile

    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(source)
    names: dict[str, Any] = {"__name__": name}
    exec(compile(source, str(path), "exec"), names)
    return names


def burst_s(call: Callable[[], Any], device: str) -> float:
    """Mean seconds of the calls of one burst after its first; on a CPU the thread's own time, which neighbours disturb
    less. All results stay alive until the end, as the evaluator keeps them: fresh memory is part of a call's cost.
    """
    import torch

    clock = time.perf_counter if device == "cuda" else time.thread_time
    results = [call()]
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    for _ in range(CALLS - 1):
        results.append(call())
        if device == "cuda":
            torch.cuda.synchronize()
    return (clock() - start) / (CALLS - 1)


def measure(family: str, index: int, size: Any, pairs: int, device: str) -> list[dict[str, Any]]:
    """Speedups of all seeds of one task: median of paired ratios of bursts, in random order."""
    import torch

    task = generate(family, index, size)
    seeds = seed_kernels(task)
    reference = namespace(task.source, "reference")
    arguments = reference["get_init_inputs"]()
    with torch.no_grad(), torch.device(device):
        model = reference["Model"](*arguments)
        inputs = reference["get_inputs"]()
        expected = model(*inputs)
        rows = []
        for number, seed in enumerate(seeds):
            row = {
                "task": task.id, "kind": task.name, "seed": seed.name, "style": seed.style, "speed": seed.speed,
                "parameters": dict(seed.parameters),
            }  # fmt: skip
            try:
                candidate = namespace(seed.source, f"seed{number}")["ModelNew"](*arguments)
                candidate.load_state_dict(model.state_dict())
                torch.testing.assert_close(candidate(*inputs), expected, rtol=1e-4, atol=1e-4 * expected.std().item())
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one seed is its line of the table
                rows.append({**row, "error": f"{type(error).__name__}: {str(error)[:300]}"})
                continue
            arms = [lambda: model(*inputs), lambda candidate=candidate: candidate(*inputs)]
            times_s: list[list[float]] = [[], []]
            for _ in range(pairs):
                for arm in random.sample((0, 1), 2):
                    times_s[arm].append(burst_s(arms[arm], device))
            ratios = [r / c for r, c in zip(*times_s, strict=True)]
            rows.append({
                **row, "speedup": statistics.median(ratios), "reference_ms": 1e3 * statistics.median(times_s[0]),
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(TRAINING_FAMILIES))
    parser.add_argument("--size", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if options.size == "gpu" else "cpu"
    for family in options.families:
        rows = []
        for index in range(options.first, options.first + options.tasks):
            rows += measure(family, index, options.size, options.pairs, device)
        if options.out:
            with options.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        print_family(family, rows)


def print_family(family: str, rows: list[dict[str, Any]]) -> None:
    """One line per template: the class, then the median and range of its speedups over tasks."""
    by_seed: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in [row for row in rows if "error" in row]:
        print(f"  WRONG  {row['task']} {row['seed']}: {row['error']}")
    rows = [row for row in rows if "error" not in row]
    for row in rows:
        by_seed[row["speed"], row["seed"].partition("-")[0]].append(row["speedup"])
    reference_ms = [row["reference_ms"] for row in rows]
    print(f"{family}: reference {min(reference_ms):.2f}-{max(reference_ms):.2f} ms", flush=True)
    for (speed, name), values in sorted(by_seed.items(), key=lambda item: (SPEEDS.index(item[0][0]), item[0][1])):
        middle = statistics.median(values)
        print(f"  {speed:6} {name:28} {middle:6.2f}x  ({min(values):.2f} - {max(values):.2f}, {len(values)} tasks)")


if __name__ == "__main__":
    main()
