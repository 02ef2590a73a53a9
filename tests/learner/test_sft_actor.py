"""Stage 1 over several ranks: the same losses as one rank, one curve, one report, checkpoints that go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from learner.batch import TokenSequence
from learner.sft_data import SftPair
from learner.sft_pairs import Pairs, write_pairs
from tasks.integrity import project_root

pytestmark = pytest.mark.heavy

RANK = """
import sys
from learner.config import DeepSpeedConfig, LearnerConfig, OptimizerConfig, PolicyConfig, SftConfig, SftDataConfig
from learner.sft_actor import SftRank

model, folder, pairs, rank, world, address, steps = sys.argv[1:]
config = LearnerConfig(
    device="cpu", policy=PolicyConfig(model=model, dtype="fp32", lora_rank=0), deepspeed=DeepSpeedConfig(zero_stage=2),
    sft=SftConfig(
        batch=6, steps=int(steps), held_out_every=2, checkpoint_every=2, data=SftDataConfig(seed=1),
        optimizer=OptimizerConfig(learning_rate=1e-2),
    ),
)
SftRank(config, folder, pairs, "r", rank=int(rank), world=int(world)).run(address)
"""


def pairs_file(path: Path) -> Path:
    """Completions of different lengths, so that the ranks' shares differ."""
    made = [
        SftPair(
            TokenSequence((3 + n % 5, 50, 51), (3 + n % 5,) * (2 + n % 4) + (2,)), f"t/{n}", (), "seed", "slow", 0
        )
        for n in range(25)
    ]  # fmt: skip
    write_pairs(Pairs(made[:20], made[20:], {"prompt too long": 2}), path, "made from")
    return path


def run(model: Path, folder: Path, pairs: Path, world: int, port: int, steps: int) -> list[dict[str, Any]]:
    """All ranks to their end; the curve."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(project_root()), "OMP_NUM_THREADS": "1"}
    address = f"127.0.0.1:{port}" if world > 1 else ""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, *map(str, (model, folder, pairs, rank, world, address, steps))],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    for rank in ranks:
        _, errors = rank.communicate(timeout=200)
        assert rank.returncode == 0, errors
    return [json.loads(line) for line in (folder / "sft.jsonl").read_text().splitlines()]


def test_two_ranks_learn_what_one_learns_and_go_on_from_their_checkpoint(
    tiny_model: Path, tmp_path: Path, free_port: int
) -> None:
    pairs = pairs_file(tmp_path / "pairs.jsonl.gz")
    one = run(tiny_model, tmp_path / "one", pairs, 1, free_port, 4)
    run(tiny_model, tmp_path / "two", pairs, 2, free_port, 2)
    two = run(tiny_model, tmp_path / "two", pairs, 2, free_port, 4)
    assert [line["step"] for line in two] == [0, 1, 2, 3]
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-4)
    assert [line["gradient_norm"] for line in two] == pytest.approx([line["gradient_norm"] for line in one], rel=1e-3)
    assert two[3]["held_out_loss"] == pytest.approx(one[3]["held_out_loss"], rel=1e-4)
    assert one[3]["loss"] < one[0]["loss"]
    report = json.loads((tmp_path / "two" / "report.json").read_text())
    assert (report["steps"], report["pairs"], report["demonstrations_left_out"]) == (4, 20, {"prompt too long": 2})
