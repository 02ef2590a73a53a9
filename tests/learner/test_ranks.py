"""Two ranks behind one leading trainer: steps, checkpoint and publication of weights that ZeRO-3 has sharded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from safetensors.torch import save_file
from learner.config import DeepSpeedConfig, GrpoConfig, LearnerConfig, OptimizerConfig, PolicyConfig
from learner.ranks import LeadingTrainer, RankTrainer
from tests.learner.test_engine import items

model, out, rank, world, address = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
config = LearnerConfig(
    device="cpu", policy=PolicyConfig(model=model, lora_rank=4, dtype="fp32"),
    optimizer=OptimizerConfig(learning_rate=1e-2), deepspeed=DeepSpeedConfig(zero_stage=3, timeout_s=120),
    grpo=GrpoConfig(kl_weight=0.1),
)
own = RankTrainer(config, rank=rank, world=world, address=address)
if rank > 0:
    own.follow()
else:
    leading = LeadingTrainer(own)
    leading.step(items())
    (out / "checkpoint").mkdir()
    leading.save(out / "checkpoint")
    after = [leading.step(items()) for _ in range(2)][-1]
    save_file({{n: t.detach().clone() for n, t in leading.weights()}}, out / "two.safetensors")
    leading.load(out / "checkpoint")
    again = [leading.step(items()) for _ in range(2)][-1]
    save_file({{n: t.detach().clone() for n, t in leading.weights()}}, out / "again.safetensors")
    import json
    (out / "figures.json").write_text(json.dumps([after, again]))
    leading.close()
"""


def run(tmp_path: Path, model: Path, world: int, port: int) -> Path:
    out = tmp_path / f"world{world}"
    out.mkdir()
    program = PROGRAM.format(root=str(ROOT))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(model), str(out), str(rank), str(world), f"127.0.0.1:{port}"]
        )
        for rank in range(world)
    ]
    assert [process.wait(timeout=300) for process in ranks] == [0] * world
    return out


def test_two_ranks_train_publish_and_resume_as_one(tiny_model: Path, tmp_path: Path, free_port: int) -> None:
    one, two = run(tmp_path, tiny_model, 1, free_port), run(tmp_path, tiny_model, 2, free_port)
    plain = load_file(tiny_model / "model.safetensors")
    alone, together = load_file(one / "two.safetensors"), load_file(two / "two.safetensors")
    assert set(together) == set(plain)
    changed = [name for name in plain if not torch.equal(together[name], plain[name])]
    assert changed
    assert all("proj" in name for name in changed)
    for name in changed:  # Adam divides by tiny second moments, so single entries may differ
        change, difference = (alone[name] - plain[name]).abs().mean(), (alone[name] - together[name]).abs().mean()
        assert difference < 0.02 * change, name
    resumed = load_file(two / "again.safetensors")
    assert all(torch.equal(resumed[name], together[name]) for name in resumed)
    after, again = json.loads((two / "figures.json").read_text())
    assert after["loss"] == again["loss"]
    assert after["kl"] > 0
