"""Every seed kernel against its reference: torch in float64, C in float32, Triton in its interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.procedural import TRAINING_FAMILIES, SeedKernel, generate, seed_kernels
from tasks.procedural.seeding import templates
from tasks.records import Task

torch = pytest.importorskip("torch")
RANGES = [pytest.param(range(3), id="few"), pytest.param(range(3, 24), id="many", marks=pytest.mark.slow)]


def _families(style: str) -> list[str]:
    return [family for family in TRAINING_FAMILIES if any(t.style == style for t in templates(family))]


def _run(source: str, name: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(source, name, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def _check(task: Task, seeds: list[SeedKernel], cast: Callable[[Any], Any]) -> None:
    reference = _run(task.source, task.id)
    torch.manual_seed(7)
    arguments = reference["get_init_inputs"]()
    model = reference["Model"](*arguments)
    inputs = [cast(x) for x in reference["get_inputs"]()]
    model.to(inputs[0].dtype)
    before = [x.clone() for x in inputs]
    expected = model(*inputs)
    for seed in seeds:
        candidate = _run(seed.source, f"{task.id} {seed.name}")["ModelNew"](*arguments).to(inputs[0].dtype)
        candidate.load_state_dict(model.state_dict())
        first, second = candidate(*inputs), candidate(*inputs)
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)), f"{seed.name} changes its inputs"
        assert (first.shape, first.dtype) == (expected.shape, expected.dtype), seed.name
        storages = {t.untyped_storage().data_ptr() for t in [*inputs, first, second]}
        assert len(storages) == len(inputs) + 2, f"{seed.name} returns memory that is not its own"
        tolerance = 1e-9 if expected.dtype == torch.float64 else 2e-5
        torch.testing.assert_close(
            second, expected, rtol=tolerance, atol=tolerance * expected.std().item(),
            msg=lambda text, seed=seed: f"{task.id} {seed.name}: {text}",
        )  # fmt: skip


@pytest.mark.parametrize("indices", RANGES)
@pytest.mark.parametrize("family", TRAINING_FAMILIES)
def test_torch_seeds_equal_the_reference_in_float64(family: str, indices: range) -> None:
    for index in indices:
        task = generate(family, index, "cpu")
        seeds = [seed for seed in seed_kernels(task) if seed.style == "torch"]
        _check(task, seeds, lambda x: x.double() if x.is_floating_point() else x)


@pytest.mark.parametrize("indices", RANGES)
@pytest.mark.parametrize("family", _families("c"))
def test_c_seeds_equal_the_reference(
    family: str, indices: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler `cc` on this machine")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for index in indices:
        task = generate(family, index, "cpu")
        _check(task, [seed for seed in seed_kernels(task) if seed.style == "c"], lambda x: x)


@pytest.mark.parametrize("indices", RANGES)
def test_triton_seeds_equal_the_reference_in_the_interpreter(indices: range) -> None:
    """In a process of its own, since Triton decides at import whether it interprets."""
    pytest.importorskip("triton", reason="triton is not installed")
    families = _families("triton")
    script = Path(__file__).with_name("interpret_triton_seeds.py")
    done = subprocess.run(
        [sys.executable, str(script), str(indices.start), str(indices.stop), *families],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) >= len(families) * len(indices)
