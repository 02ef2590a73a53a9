"""Training from a file of groups by the command: the same weights as the learner's own, through kill -9 as well."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.session import run_training
from learner.rollouts import OpenRollouts
from tasks.errors import UsageError
from tasks.integrity import project_root
from tasks.records import (
    Candidate,
    Evaluation,
    Measurement,
    PolicyVersion,
    Prompt,
    Sample,
    ScoredGroup,
    ScoredSample,
)

SETTINGS = {
    "learner.policy.adapter": "", "learner.policy.dtype": "fp32", "learner.policy.lora_rank": "4",
    "learner.optimizer.learning_rate": "0.01", "learner.grpo.groups_per_step": "2", "learner.steps": "3",
}  # fmt: skip


def group(number: int, step: int) -> ScoredGroup:
    """Three samples with speedups 1, 2 and 3."""
    name = f"r-g{number:05d}"
    samples = []
    for index in range(3):
        ids = tuple(3 + (7 * number + 5 * index + j) % 60 for j in range(4 + 3 * index))
        candidate = Candidate(source=f"x = {index}")
        timing = Measurement(
            speedup=1.0 + index, ci_low=1.0 + index, ci_high=2.0 + index, reference_ms=2, candidate_ms=1, pairs=20
        )
        evaluation = Evaluation(
            outcome="accepted", step="time", measurement=timing, task_id="t", task_hash="h" * 64,
            candidate_hash=candidate.content_hash,
        )  # fmt: skip
        sample = Sample(
            id=f"{name}/{index}", prompt_id=name, index=index, text="", token_ids=ids, logprobs=(-5.0,) * len(ids),
            policy_versions=(PolicyVersion(step=step),), candidate=candidate,
        )  # fmt: skip
        samples.append(ScoredSample(sample=sample, evaluation=evaluation))
    prompt = Prompt(
        id=name, run_id="r", task_id="t", task_hash="h" * 64, device_type="cpu", text="", token_ids=tuple(range(3, 12))
    )
    return ScoredGroup(id=name, run_id="r", prompt=prompt, samples=tuple(samples))


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(group(n, n // 2).to_json() + "\n" for n in range(6)))
    return path


def command(folder: Path, model: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = [word for key, value in SETTINGS.items() for word in (f"--{key}", value)]
    environment = {
        **os.environ, "PYTHONPATH": str(project_root()), "OMP_NUM_THREADS": "1",
        "RAY_memory_monitor_refresh_ms": "0",  # what else runs on the machine is no concern of this run
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli.main", "train", *arguments, "--rollout.model", str(model), *settings],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.heavy
def test_a_file_alone_trains_the_policy_as_its_groups_would_have(
    chat_model: Path, tmp_path: Path, rollouts: Path
) -> None:
    import torch

    from deploy.config import load_config
    from learner.actor import LearnerProcess
    from learner.export import trained_weights

    done = command(tmp_path, chat_model, "demo", "--rollouts", str(rollouts))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 steps on 6 groups: 6 trained" in done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    lines = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["gradient_norm"] > 0 for line in lines)
    assert not (run / "events.jsonl").exists()

    overrides = [word for key, value in SETTINGS.items() for word in (f"--{key}", value)]
    config = load_config("demo", overrides).learner
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"model": str(chat_model)})})
    stream = OpenRollouts(str(rollouts), "r", str(tmp_path / "starts.txt"))

    async def own() -> None:
        learner = LearnerProcess(config, "r", str(tmp_path / "checkpoints"), stream)
        for _ in range(6):
            await learner.learn()

    asyncio.run(own())
    weights: list[dict[str, Any]] = [
        trained_weights(folder / "step-00000003.e0") for folder in (run / "checkpoints", tmp_path / "checkpoints")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    again = command(tmp_path, chat_model, "--resume", str(run), "--rollouts", str(rollouts), "--learner.steps", "9")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "3 steps on 6 groups: 6 trained" in again.stdout, "nothing is trained on twice"


def test_mistakes_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--rollouts trains one stage that samples"):
        run_training("demo", ["--run.stages", "sft"], rollouts="x")
    with pytest.raises(UsageError, match="--rollouts trains one stage that samples"):
        run_training("demo", ["--run.stages", "sft,rl"], rollouts="x")
