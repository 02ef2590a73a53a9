"""The examples run as they are written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli.shapes import read_shapes
from evaluator.compile import discover
from tasks.suites import load_task

ROOT = Path(__file__).resolve().parents[2]


def _run(name: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"], cwd=ROOT, text=True, capture_output=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(not discover().cc, reason="no C compiler on this machine")
def test_own_suite_measures_every_task() -> None:
    lines = _run("own_suite")
    assert [line.split()[:2] for line in lines] == [["center_rows", "accepted"], ["leaky_scale", "accepted"]]


def test_custom_reward_pays_right_kernels_more_than_wrong_ones() -> None:
    lines = _run("custom_reward")
    rewards = {line.split("  ")[-1]: float(line.split()[0]) for line in lines}
    assert len(rewards) == 4
    assert rewards.pop("x - x.mean(dim=0, keepdim=True)") == -0.5
    assert min(rewards.values()) >= -0.4
    assert sum(float(line.split()[2]) for line in lines) == pytest.approx(0.0, abs=0.02)


def test_own_engine_goes_through_prompt_parser_and_evaluator() -> None:
    lines = [line for line in _run("own_engine") if line.startswith("example/0/")]
    assert [line.split()[1] for line in lines] == ["accepted", "rejected", "accepted"]


def test_every_example_shape_fits_its_task() -> None:
    task = load_task(ROOT / "examples" / "suite" / "center_rows.py")
    assert len(read_shapes(ROOT / "examples" / "shapes.jsonl", task)) == 3
