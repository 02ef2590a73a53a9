"""Probe: how the time of one call spreads on a GPU, by clock and by how the caller waits.

    python scripts/probe_cuda_timing.py OUT.jsonl       # on a machine with one NVIDIA GPU, about 40 s

Two equal arms A and B in processes of their own take turns of 16 calls, each call on an idle device with a cold L2
cache; an arm without the turn is stopped by a signal, as in the evaluator. A call is timed by the host (until the
device is idle), by two CUDA events, and by the launch alone. One JSON line a turn; prints, for each kernel, way of
waiting and clock, the standard deviation of log(A/B) over turns for the turn's mean, midmean and median.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from evaluator.worker import cudart

TURNS = 40
CALLS = 16
WAYS = {"spin": 1, "auto": 0, "block": 4}
"""Flags of cudaSetDeviceFlags."""


def kernels() -> dict[str, Callable[[], Any]]:
    def relu(count: int) -> Callable[[], Any]:
        x = torch.randn(count, device="cuda")
        return lambda: torch.relu(x)

    def matmul(side: int) -> Callable[[], Any]:
        x, y = (torch.randn(side, side, device="cuda") for _ in range(2))
        return lambda: x @ y

    return {"relu_4mb": lambda: relu(1 << 20), "matmul_2048": lambda: matmul(2048), "relu_512mb": lambda: relu(1 << 27)}


def serve(flags: int, requests: int, answers: int) -> None:
    """An arm: for each kernel's name read, one turn."""
    runtime = cudart.load()
    mapped = Path("/proc/self/maps").read_text().splitlines()
    library = ctypes.CDLL(next(line.split(maxsplit=5)[5] for line in mapped if "/libcudart" in line))
    library.cudaSetDeviceFlags(flags)
    runtime.open()
    flush = runtime.malloc(2 * runtime.l2_bytes())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    made: dict[str, Any] = {}
    now = time.perf_counter_ns
    with open(requests) as lines, open(answers, "w") as out:
        for line in lines:
            name = line.strip()
            call = made.get(name) or made.setdefault(name, kernels()[name]())
            rows, kept = [], []
            for _ in range(CALLS):
                runtime.reset_persisting_l2()
                runtime.fill(flush, 0, 2 * runtime.l2_bytes())
                runtime.wait()
                begin.record()
                t0 = now()
                kept.append(call())
                t1 = now()
                end.record()
                runtime.wait()
                t2 = now()
                rows.append([t2 - t0, round(1e6 * begin.elapsed_time(end)), t1 - t0])
            kept.clear()
            out.write(json.dumps(rows) + "\n")
            out.flush()


class Arm:
    """An arm's process, stopped while it has no turn."""

    def __init__(self, flags: int) -> None:
        theirs, self._to = os.pipe()
        self._from, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            serve(flags, theirs, answers)
            os._exit(0)
        self._lines = open(self._from)  # noqa: SIM115

    def turn(self, name: str) -> list[list[int]]:
        os.kill(self.pid, signal.SIGCONT)
        os.write(self._to, f"{name}\n".encode())
        rows = json.loads(self._lines.readline())
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)
        return rows

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def midmean(values: list[float]) -> float:
    """Mean of the middle half."""
    ordered, cut = sorted(values), len(values) // 4
    return statistics.fmean(ordered[cut : len(values) - cut])


def main(out: Path) -> None:
    rows = []
    for way, flags in WAYS.items():
        arms = [Arm(flags), Arm(flags)]
        for name in kernels_names():
            for turn in range(-3, TURNS):
                found = {arm: arms[arm].turn(name) for arm in ((0, 1) if turn % 2 else (1, 0))}
                if turn >= 0:
                    rows.append({"way": way, "kernel": name, "a": found[0], "b": found[1]})
        for arm in arms:
            arm.close()
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for way in WAYS:
        for name in kernels_names():
            some = [row for row in rows if (row["way"], row["kernel"]) == (way, name)]
            for clock, column in (("host", 0), ("events", 1), ("launch", 2)):
                show(way, name, clock, [[[call[column] for call in row[arm][1:]] for arm in "ab"] for row in some])


def kernels_names() -> list[str]:
    return ["relu_4mb", "matmul_2048", "relu_512mb"]


def show(way: str, name: str, clock: str, turns: list[Any]) -> None:
    spreads = []
    for middle in (statistics.fmean, midmean, statistics.median):
        logs = [math.log(middle(a) / middle(b)) for a, b in turns]
        spreads.append(f"{100 * statistics.stdev(logs):6.2f} (mean {100 * statistics.fmean(logs):+.2f})")
    call_us = statistics.median(call for turn in turns for arm in turn for call in arm) / 1e3
    sys.stdout.write(f"{way:6s} {name:12s} {clock:7s} {call_us:8.1f} us   sd of log ratio, %: {'  '.join(spreads)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
