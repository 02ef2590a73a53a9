"""The demo adapter's recipe, from data to samples, on the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parent.parent.parent


def test_two_steps_leave_adapter_recipe_curve_and_samples(chat_model: Path, tmp_path: Path) -> None:
    model, out = chat_model, tmp_path / "out"
    subprocess.run(
        [
            sys.executable, str(ROOT / "scripts" / "train_demo_adapter.py"), "--model", str(model), "--out", str(out),
            "--steps", "2", "--device", "cpu", "--max-prompt-tokens", "800", "--max-completion-tokens", "400",
            "--rank", "2", "--pairs", "6", "--instances", "40",
        ],
        check=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    recipe = json.loads((out / "recipe.json").read_text())
    assert (out / "adapter" / "adapter_model.safetensors").stat().st_size == recipe["weights_bytes"]
    assert len(recipe["report"]["data_hash"]) == 64
    assert recipe["report"]["steps"] == 2
    assert str(tmp_path) not in json.dumps(recipe)
    assert len((out / "sft.jsonl").read_text().splitlines()) == 2
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2
    for sample in samples:
        assert sample["split"] == "held_out_composition"
        assert {"task", "candidate", "copy", "equals_seed", "completion"} <= set(sample)
