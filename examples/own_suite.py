"""A suite of one's own: every file of a folder is a task, and one evaluator measures a kernel for each.

    python examples/own_suite.py

A folder can be named wherever a suite can: `list_tasks("my/folder")`, `kontrast evaluate my/folder/task.py kernel.py`,
or `tasks = "my/folder"` in the configuration of a run. Tasks are known by their content, not by their path.
"""

from __future__ import annotations

from pathlib import Path

from evaluator import Evaluator, EvaluatorConfig
from tasks.figures import interval, milliseconds, times
from tasks.records import Candidate
from tasks.suites import list_tasks

SUITE = Path(__file__).parent / "suite"

KERNELS = {
    # One pass by the library's own normalisation, which also centres rows.
    "center_rows": """
import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=1, keepdim=True)
""",
    # A C loop behind ctypes: it reads and writes each number once. The compiler runs inside the sandbox.
    "leaky_scale": """
import ctypes
import subprocess

import torch
from torch import nn

open("kernel.c", "w").write('''
void leaky_scale(const float* x, const float* scale, float* y, long rows, long width) {
    for (long r = 0; r < rows; ++r)
        for (long c = 0; c < width; ++c) {
            float v = x[r * width + c];
            y[r * width + c] = (v > 0 ? v : 0.1f * v) * scale[c];
        }
}
''')
subprocess.run(["gcc", "-O3", "-march=native", "-shared", "-fPIC", "kernel.c", "-o", "kernel.so"], check=True)
kernel = ctypes.CDLL("./kernel.so").leaky_scale


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = torch.empty_like(x)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, self.scale, y)]
        kernel(*pointers, ctypes.c_long(x.shape[0]), ctypes.c_long(x.shape[1]))
        return y
""",
}


def main() -> None:
    with Evaluator("cpu", EvaluatorConfig(protocol="reward")) as evaluator:
        for task in list_tasks(SUITE):
            evaluation = evaluator.evaluate(task, Candidate(source=KERNELS[task.name]))
            measured = evaluation.measurement
            if measured is None:
                print(f"{task.name:<12} {evaluation.outcome} ({evaluation.reason}): {evaluation.message}")
            else:
                print(
                    f"{task.name:<12} {evaluation.outcome} {times(measured.speedup)} "
                    f"({interval(measured.ci_low, measured.ci_high)}), "
                    f"reference {milliseconds(measured.reference_ms)}"
                )


if __name__ == "__main__":
    main()
