"""What the evaluator costs beside compiling, timing and the per-task oracle, on CPU.

    python tests/bench/evaluator_overhead.py [--repeats 20]

Prints two tables: the zygote's request until a candidate's module is loaded in all isolation layers, against a fork
without any; and one evaluation of a 5 ms task by step, against the time that is spent timing. Aims: at most 25 ms
median, and at most 1.5 s per candidate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from evaluator import Evaluator, EvaluatorConfig
from evaluator.config import TimingConfig
from evaluator.worker import allocator, wire
from evaluator.worker.process import Zygote
from evaluator.worker.sandbox import SandboxPlan
from tasks.records import Candidate, Task

MODULE = b"import torch\nfrom torch import nn\nclass ModelNew(nn.Module):\n    pass\n"
TASK = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
    def forward(self, x):
        return torch.relu(self.fc(x))
def get_inputs():
    return [torch.randn(256, 1024)]
def get_init_inputs():
    return [1024]
"""
CANDIDATE = """
import torch
from torch import nn
class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
    def forward(self, x):
        return torch.addmm(self.fc.bias, x, self.fc.weight.t()).relu_()
"""


def load_ms(zygote: Zygote, plan: SandboxPlan) -> tuple[float, list[str]]:
    """From the request for a worker until its module is loaded, in ms, and the layers that were on."""
    source = os.memfd_create("source")
    os.write(source, MODULE)
    begin = time.perf_counter()
    child = zygote.spawn_worker(plan)
    layers = wire.receive(child.channel, 10.0)["layers"]
    wire.send(child.channel, {"op": "load", "class_name": "ModelNew"}, [source])
    assert wire.receive(child.channel, 10.0)["defined"]
    took_ms = 1e3 * (time.perf_counter() - begin)
    child.kill()
    os.close(source)
    return took_ms, list(layers)


def table_of_starts(repeats: int) -> None:
    with_layers, bare = SandboxPlan(), SandboxPlan(layers=(), fallback_scratch="/tmp/kontrast-bench")
    zygote = Zygote(scratch="/tmp/kontrast-bench", allocator=allocator.library())
    zygote.start()
    print(f"{'request to module loaded':<28}{'median ms':>10}{'p90 ms':>8}  layers")
    try:
        for name, plan in (("all layers", with_layers), ("no layer", bare)):
            runs = [load_ms(zygote, plan) for _ in range(repeats)]
            times = sorted(took for took, _ in runs)
            middle, high, layers = statistics.median(times), times[int(0.9 * len(times))], ",".join(runs[0][1])
            print(f"{name:<28}{middle:>10.1f}{high:>8.1f}  {layers}")
    finally:
        zygote.close()


def table_of_steps(repeats: int) -> None:
    config = EvaluatorConfig(timing=TimingConfig(cap_s=2.0))
    rows: dict[str, list[float]] = {}
    with Evaluator(config=config) as evaluator:
        task = Task(id="file:bench", source=TASK)
        evaluator.evaluate(task, Candidate(source=CANDIDATE))  # admission and start-up are paid once per task
        for _ in range(repeats):
            begin = time.perf_counter()
            result = evaluator.evaluate(task, Candidate(source=CANDIDATE))
            rows.setdefault("whole", []).append(time.perf_counter() - begin)
            assert result.outcome == "accepted", result.message
            for step, seconds in result.seconds_by_step.items():
                rows.setdefault(step, []).append(seconds)
    exclusive = {"time", "confirm", "compile"}
    beside = [
        whole - sum(rows[step][i] for step in exclusive & set(rows)) for i, whole in enumerate(rows["whole"])
    ]  # fmt: skip
    print(f"\n{'evaluation, by step':<28}{'median s':>10}")
    for step, seconds in rows.items():
        print(f"{step:<28}{statistics.median(seconds):>10.3f}")
    print(f"{'all but timing, compiling':<28}{statistics.median(beside):>10.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    table_of_starts(repeats)
    table_of_steps(max(3, repeats // 4))


if __name__ == "__main__":
    main()
