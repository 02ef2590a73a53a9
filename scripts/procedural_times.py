"""Records what the references of the procedural suite take on this machine, one JSON line per task, and prints a table.

    python scripts/procedural_times.py --device cuda --out docs/measurements/procedural/h200.jsonl
    python scripts/procedural_times.py --device cpu --out docs/measurements/procedural/cpu.jsonl

For choosing sizes: trusted references alone, without the evaluator. A time is the median of single calls after two warm
ones: on a GPU between two synchronizations, on a CPU the time of the one thread. Sizes aim at 0.2-5 ms on a GPU and
1.5-5 ms on one CPU thread; the table says how many are outside.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from tasks.procedural import FAMILIES, generate
from tasks.splits import split_of

AIM_MS = {"gpu": (0.2, 5.0), "cpu": (1.5, 5.0)}


def device_name(device: str) -> str:
    """What the times belong to."""
    if device == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def reference_row(family: str, index: int, size: Any, device: str, calls: int) -> dict[str, Any]:
    """Time and memory of one reference."""
    import torch

    task = generate(family, index, size)
    names: dict[str, Any] = {}
    exec(compile(task.source, task.id, "exec"), names)
    with torch.no_grad(), torch.device(device):
        model = names["Model"](*names["get_init_inputs"]())
        inputs = names["get_inputs"]()
        times_ms = []
        for _ in range(calls + 2):
            synchronize(device)
            start = clock(device)
            result = model(*inputs)
            synchronize(device)
            times_ms.append(1e3 * (clock(device) - start))
    return {
        "task": task.id, "size": size, "name": task.name, "split": split_of(task), "hash": task.content_hash[:12],
        "reference_ms": round(statistics.median(times_ms[2:]), 4),
        "input_mb": round(sum(x.nbytes for x in inputs) / 1e6, 1), "output_mb": round(result.nbytes / 1e6, 1),
    }  # fmt: skip


def clock(device: str) -> float:
    """Seconds: the wall's on a GPU, the thread's own on a CPU, which neighbours disturb less."""
    return time.perf_counter() if device == "cuda" else time.thread_time()


def synchronize(device: str) -> None:
    """Waits until the device is idle."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def print_table(rows: list[dict[str, Any]], aim_ms: tuple[float, float]) -> None:
    """One line per kind of reference."""
    print(f"{'reference':36} {'tasks':>5} {'min':>8} {'median':>8} {'max':>8} ms   outside {aim_ms[0]}-{aim_ms[1]}")
    for name in dict.fromkeys(row["name"] for row in rows):
        times = sorted(row["reference_ms"] for row in rows if row["name"] == name)
        outside = sum(not aim_ms[0] <= t <= aim_ms[1] for t in times)
        middle = statistics.median(times)
        print(f"{name:36} {len(times):5} {times[0]:8.3f} {middle:8.3f} {times[-1]:8.3f}      {outside:3}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--calls", type=int, default=9)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    size: Any = "gpu" if options.device == "cuda" else "cpu"
    about = {"device": device_name(options.device), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    rows = []
    for family in options.families:
        for index in range(options.tasks):
            rows.append(reference_row(family, index, size, options.device, options.calls))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps({**about, **row}, sort_keys=True) + "\n" for row in rows))
    print(f"{about['device']}, torch {about['torch']}")
    print_table(rows, AIM_MS[size])


if __name__ == "__main__":
    main()
