"""Stages in their order, weights handed on, and stage 1 from the command to a folder that transformers loads."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import exporting, stages
from deploy.cli.stages import Stage, needs_tasks, run_stages, with_weights
from deploy.config import Config, load_config
from deploy.folder import RunFolder
from deploy.graph.tuning import Curve
from deploy.resolve import ConfigError
from tasks.errors import UsageError
from tasks.integrity import project_root
from tasks.records import Candidate, Demonstration, Measurement, Task

SETTINGS = ["--learner.policy.lora_rank", "4"]


class Recording:
    """Stands in for stages: each says what it began from, and ends as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[tuple[str, str, str]] = []
        self.stopped: set[str] = set()
        for name in ("sft", "rl"):
            monkeypatch.setitem(stages.STAGES, name, Stage(self._runner(name), samples=name != "sft"))
        monkeypatch.setattr(stages, "hand_on", lambda config, folder: (folder.path / stages.POLICY).mkdir())

    def _runner(self, name: str) -> Any:
        def run(config: Config, folder: RunFolder, tasks: Sequence[Task]) -> int:
            adapter = Path(config.learner.policy.adapter)
            self.began.append((name, folder.run_id, f"{adapter.parent.name}/{adapter.name}"))
            status = "stopped" if name in self.stopped else "finished"
            folder.write_json("summary.json", {"status": status})
            return 1 if name == "rl" else 0

        return run


def config_of(*names: str, **settings: str) -> Config:
    more = [word for key, value in settings.items() for word in (f"--{key.replace('__', '.')}", value)]
    return load_config("demo", ["--run.stages", ",".join(names), "--learner.policy.adapter", "start/here", *more])


def test_each_stage_begins_with_what_the_former_ended_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, run = Recording(monkeypatch), RunFolder(tmp_path / "r1").create()
    assert run_stages(config_of("sft", "rl"), run, []) == 1
    assert recording.began == [("sft", "r1-sft", "start/here"), ("rl", "r1-rl", "sft/policy")]
    assert run_stages(config_of("sft", "rl"), run, []) == 1
    assert len(recording.began) == 2, "what is finished is not run again"
    assert run.stage("rl").store == run.store


def test_a_stopped_stage_is_gone_on_with_and_the_next_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, run = Recording(monkeypatch), RunFolder(tmp_path / "r1").create()
    monkeypatch.setitem(stages.STAGES, "again", stages.STAGES["rl"])
    recording.stopped = {"rl"}
    run_stages(config_of("rl", "again"), run, [])
    recording.stopped = set()
    run_stages(config_of("rl", "again"), run, [])
    assert [name for name, _, _ in recording.began] == ["rl", "rl", "rl"]
    assert [run_id for _, run_id, _ in recording.began] == ["r1-rl", "r1-rl", "r1-again"]


def test_a_run_of_one_stage_that_samples_is_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, run = Recording(monkeypatch), RunFolder(tmp_path / "r1").create()
    run_stages(config_of("rl"), run, [])
    assert recording.began == [("rl", "r1", "start/here")]


def test_a_model_trained_whole_is_handed_on_as_the_model(tmp_path: Path) -> None:
    config = load_config("demo", ["--learner.policy.lora_rank", "0", "--learner.policy.adapter", ""])
    handed = str(tmp_path.resolve() / "sft" / "policy")
    changed = with_weights(config, RunFolder(tmp_path / "sft"))
    assert (changed.learner.policy.model, changed.rollout.model, changed.learner.policy.adapter) == (handed, handed, "")


@pytest.mark.parametrize(("names", "said"), [
    ("sft,rlhf", "there is no stage 'rlhf'.*the stages are sft, self_supervised, contrastive"),
    ("rl,rl", "each once"), ("", "name one or more"),
])  # fmt: skip
def test_stages_that_cannot_be_run_are_one_sentence(names: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        needs_tasks(config_of(*names.split(",")) if names else config_of())


def test_each_stage_has_its_own_learner_and_what_contradicts_itself_there_is_said() -> None:
    config = config_of("sft", "self_supervised", "contrastive")
    stage = {name: stages.config_of(config, name).learner.stage for name in (*config.run.stages, "rl")}
    assert stage == {"sft": "contrastive", "self_supervised": "self_supervised", "contrastive": "contrastive",
                     "rl": "contrastive"}  # fmt: skip
    with pytest.raises(ConfigError, match=r"of stage frozen.*learns nothing"):
        needs_tasks(config_of("sft", "frozen", cluster__learner_ranks="2"))


def test_stage_1_needs_no_tasks_and_the_size_of_the_run() -> None:
    assert not needs_tasks(config_of("sft"))
    assert needs_tasks(config_of("sft", "rl"))
    with pytest.raises(ConfigError, match=r"learner\.sft\.data\.size = 'gpu' and run\.size = 'cpu' must be the same"):
        load_config("demo", ["--run.stages", "sft", "--learner.sft.data.size", "gpu"])


def test_the_curve_gives_each_step_once_whatever_is_cut_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    curve = Curve(path)
    assert list(curve.fresh()) == []
    path.write_text('{"step": 0}\n{"step": 1}\n{"step"')
    assert [line["step"] for line in curve.fresh()] == [0, 1]
    path.write_text('{"step": 0}\n')
    assert list(curve.fresh()) == []
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    assert [line["step"] for line in curve.fresh()] == [2]


def demonstrations(path: Path) -> Path:
    """One procedural task's seeds as a teacher's work."""
    from tasks.procedural import TRAINING_FAMILIES, generate, seed_kernels
    from tasks.splits import split_of

    measurement = Measurement(speedup=2, ci_low=1.9, ci_high=2.1, reference_ms=2, candidate_ms=1, pairs=20)
    task = next(t for n in range(99) if split_of(t := generate(TRAINING_FAMILIES[0], n, size="cpu")) == "train")
    lines = [
        Demonstration(
            task=task, candidate=Candidate(source=seed.source), analysis="Why.", design="How.", teacher="t",
            device_type="cpu", measurement=measurement,
        ).to_json()
        for seed in seed_kernels(task)[:3]
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    return path


def command(folder: Path, model: Path, *arguments: str) -> subprocess.Popen[str]:
    """`kontrast train` of stage 1 on the tiny model, in a process of its own with Ray of its own."""
    settings = [
        "--rollout.model", str(model), "--learner.policy.adapter", "", "--learner.policy.dtype", "fp32",
        "--learner.policy.lora_rank", "4", "--learner.sft.batch", "4", "--learner.sft.steps", "12",
        "--learner.sft.checkpoint_every", "2", "--learner.sft.held_out_every", "4", "--learner.sft.data.pairs", "12",
        "--learner.sft.data.held_out_pairs", "3", "--learner.sft.data.instances", "20",
        "--learner.sft.max_prompt_tokens", "800", "--learner.sft.max_completion_tokens", "400",
        "--learner.sft.max_tokens", "1200", "--observe.progress_s", "0.1",
    ]  # fmt: skip
    environment = {
        **os.environ, "PYTHONPATH": str(project_root()), "OMP_NUM_THREADS": "1",
        "RAY_memory_monitor_refresh_ms": "0",  # what else runs on the machine is no concern of this run
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.cli.main", "train", *arguments, *([] if "--resume" in arguments else settings)],
        env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def curve_of(run: Path) -> list[dict[str, Any]]:
    path = run / "sft" / "sft.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.mark.heavy
def test_stage_1_from_the_command_through_kill_9_to_transformers(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is killed in the middle; resumed it ends with the curve and the weights of a run that was not."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = ["--learner.sft.data.demonstrations", str(demonstrations(tmp_path / "demonstrations.jsonl"))]
    whole = command(tmp_path, chat_model, "demo", "--stages", "sft", "--run.name", "whole", *data)
    output = whole.communicate(timeout=300)[0]
    assert whole.returncode == 0, output
    assert "15 pairs, 3 held out" in output
    assert "held-out perplexity" in output

    killed = command(tmp_path, chat_model, "demo", "--stages", "sft", "--run.name", "killed", *data)
    limit = time.monotonic() + 200
    run = tmp_path / "nothing"
    while len(curve_of(run)) < 5:
        assert killed.poll() is None, killed.communicate()[0]
        assert time.monotonic() < limit, "the stage did not begin"
        run = next(iter((tmp_path / "runs").glob("*-killed-*")), run)
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    resumed = command(tmp_path, chat_model, "--resume", str(run))
    output = resumed.communicate(timeout=300)[0]
    assert resumed.returncode == 0, output
    unkilled = next((tmp_path / "runs").glob("*-whole-*"))
    curves = [
        [(line["step"], line["loss"], line["held_out_loss"]) for line in curve_of(one)] for one in (unkilled, run)
    ]
    assert curves[0] == curves[1]
    assert [step for step, _, _ in curves[0]] == list(range(12))
    assert [step for step, _, held_out in curves[0] if held_out is not None] == [3, 7, 11]
    report = json.loads((run / "sft" / "report.json").read_text())
    assert report["held_out_perplexity"] == pytest.approx(math.exp(curves[1][-1][2]))
    assert report["pairs"] == 15

    monkeypatch.chdir(tmp_path)
    printed = subprocess.run(
        [sys.executable, "-m", "deploy.cli.main", "export", str(run), str(tmp_path / "printed"), "--stage", "sft"],
        env={**os.environ, "PYTHONPATH": str(project_root())}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert printed.stdout == f"adapter of stage sft, step 12: {tmp_path / 'printed'}\n", printed.stderr
    for name, one in (("whole", unkilled), ("killed", run)):
        assert "merged of stage sft, step 12" in exporting.run_export(str(one), tmp_path / name, merged=True)
    assert "adapter of stage sft, step 12" in exporting.run_export(str(run), tmp_path / "adapter")
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "killed").encode("class ModelNew(nn.Module):")])
    with torch.no_grad():
        exported = [tmp_path / name for name in ("whole", "killed", "adapter")]
        logits = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
            for folder in (*exported, run / "sft" / "policy", chat_model)
        ]
    assert torch.equal(logits[0], logits[1])
    torch.testing.assert_close(logits[2], logits[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[3], logits[1], rtol=1e-4, atol=1e-5)
    assert (logits[4] - logits[1]).abs().max() > 1e-3, "training changed nothing: the test proves nothing"


def test_what_cannot_be_exported_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "runs" / "r1").create()
    run.write_text("config.toml", config_of("sft", "rl").to_toml())
    with pytest.raises(UsageError, match="r1 has no checkpoint yet"):
        exporting.run_export("r1", tmp_path / "out")
    with pytest.raises(UsageError, match="no stage 'dpo': its stages are sft, rl"):
        exporting.run_export("r1", tmp_path / "out", stage="dpo")
    with pytest.raises(UsageError, match="--dtype fp8 is unknown"):
        exporting.run_export("r1", tmp_path / "out", dtype="fp8")
    with pytest.raises(UsageError, match="There is no run r2"):
        exporting.run_export("r2", tmp_path / "out")
