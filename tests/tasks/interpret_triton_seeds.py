"""Checks the Triton seeds of families in Triton's interpreter, on small shapes; run by `test_seed_kernels`.

TRITON_INTERPRET=1 python interpret_triton_seeds.py FIRST STOP FAMILY ...
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tasks.procedural import generate, seed_kernels

SMALL = {"_ELEMENTS": 1000}


def load(source: str, folder: Path, name: str) -> dict[str, Any]:
    """Runs a module from a file, which is where Triton reads its kernels."""
    path = folder / f"{name}.py"
    path.write_text(source)
    names: dict[str, Any] = {"__name__": name}
    exec(compile(source, str(path), "exec"), names)
    return names


def main(family: str, indices: range) -> int:
    module = importlib.import_module(f"tasks.procedural.{family}")
    for name, value in SMALL.items():
        if hasattr(module, name):
            getattr(module, name)["gpu"] = value
    if family == "pooling":
        module._CHANNELS = dict.fromkeys(module._CHANNELS, 2)
        module._GPU_BATCHES = dict.fromkeys(module._GPU_BATCHES, 2)
    checked = 0
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for index in indices:
            task = generate(family, index, "gpu")
            reference = load(task.source, Path(folder), f"reference{index}")
            model = reference["Model"]()
            inputs = reference["get_inputs"]()
            before = [x.clone() for x in inputs]
            expected = model(*inputs)
            for number, seed in enumerate(s for s in seed_kernels(task) if s.style == "triton"):
                candidate = load(seed.source, Path(folder), f"seed{index}_{number}")["ModelNew"]()
                candidate.load_state_dict(model.state_dict())
                result = candidate(*inputs)
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=2e-5 * expected.std().item())
                assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
                checked += 1
    return checked


if __name__ == "__main__":
    print(sum(main(family, range(int(sys.argv[1]), int(sys.argv[2]))) for family in sys.argv[3:]))
