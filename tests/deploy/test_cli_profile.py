"""`kontrast evaluate --profile`: what is printed, and commands that look deeper and really run."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import evaluation, replay
from deploy.cli.evaluation import Request, evaluate_batch, evaluate_one
from deploy.cli.panel import print_panel
from tasks.errors import UsageError
from tasks.records import Evaluation, Measurement
from tasks.records.profile import Profile, ProfileRow

ROOT = Path(__file__).resolve().parents[2]
TASK = """
import torch
from torch import nn
dim = 128
class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
    def forward(self, x, factor):
        return x * factor + self.width
def get_inputs():
    return [torch.randn(64, dim), 3.0]
def get_init_inputs():
    return [2]
"""
GOOD = TASK.replace("class Model(", "class ModelNew(").replace("+ self.width", "+ 2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "my good.py").write_text(GOOD)
    return tmp_path


def test_a_real_profile_is_in_the_record_with_commands_that_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = folder / "shapes.jsonl"
    rows.write_text('{"dim": 256}\n')
    request = Request(profile=True, protocol="reward", shapes=str(rows))
    paths = str(folder / "task.py"), str(folder / "my good.py")
    assert evaluate_one(request, *paths, as_json=True, make=evaluation.make_judge) == 0
    (line,) = capfd.readouterr().out.splitlines()
    (found,) = json.loads(line)["evaluations"]
    profile = Profile.model_validate(found["profile"])
    assert "aten::mul" in {row.name for row in profile.rows}
    perf, ncu, nsys = map(shlex.split, profile.commands)
    assert (perf[0], ncu[0], nsys[:2]) == ("perf", "ncu", ["nsys", "profile"])
    for words in (perf, ncu, nsys):
        words = words[words.index(sys.executable) :]
        assert words[:6] == [sys.executable, "-m", "deploy.cli.replay", *paths, "--shape"]
        assert words[6] == '{"dim": 256}'
    assert "cuda" in ncu
    assert "cuda" not in perf
    done = subprocess.run(
        perf[perf.index(sys.executable) :], cwd=folder, text=True, capture_output=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1000 calls" in done.stdout


def test_commands_name_everything_that_decides_what_runs() -> None:
    request = Request(device="cuda:1", dtype="bf16", kernelbench="kb.jsonl")
    ncu, nsys = request.deeper("kernelbench:1/1", "a.py", {})
    for command in (ncu, nsys):
        assert command.count("--device cuda:1") == 1
        assert "--dtype bf16 --kernelbench kb.jsonl" in command
        assert "--shape" not in command
    assert "--size cpu" in Request().deeper("procedural:row_norm/17", "seed:inplace", {})[1]
    assert Request().deeper("t.py", "-", {}) == ()


def _shown(profile: Profile) -> str:
    measured = Measurement(speedup=2.0, ci_low=1.9, ci_high=2.1, reference_ms=2.0, candidate_ms=1.0, pairs=20)
    found = Evaluation(
        outcome="accepted", step="time", measurement=measured, task_id="t", task_hash="0", candidate_hash="0",
        profile=profile,
    )  # fmt: skip
    stream = io.StringIO()
    print_panel(found, stream)
    return stream.getvalue()


def test_the_table_shows_kernels_and_operators_with_what_is_known() -> None:
    rows = (
        ProfileRow(name="my_kernel<float>[bold]", kind="kernel", calls=2.0, us=900.0, share=0.9),
        ProfileRow(name="aten::mul", kind="operator", calls=1.0, us=100.0, share=0.1, bytes=1_000_000),
    )
    shown = _shown(Profile(
        calls=40, rows=rows, bytes_per_call=2_000_000, flops_per_call=4_000_000_000, gb_per_s=2.0, peak_gb_per_s=4917.0,
        peak_gflop_per_s=66900.0, roofline=0.25, bound="memory", unknown=("Something is not known.",),
        commands=("ncu " + "x" * 200,),
    ))  # fmt: skip
    for part in ("my_kernel<float>[bold]", "90.0%", "not known", "1.00 MB", "10",
                 "25% of the roofline, bound by memory",
                 "4917 GB/s, 66.9 fp32 TFLOP/s", "2.00 MB", "4.00 GFLOP", "Something is not known.",
                 "ncu " + "x" * 200, "outside of the sandbox"):  # fmt: skip
        assert part in shown


def test_a_failed_profile_is_one_sentence() -> None:
    shown = _shown(Profile(unknown=("The profile failed: exit code 3.",)))
    assert "The profile failed: exit code 3." in shown
    assert "roofline" not in shown
    assert "under the profiler" not in shown


def test_profile_goes_with_neither_watch_nor_batch(folder: Path) -> None:
    with pytest.raises(UsageError, match="--profile"):
        evaluate_one(Request(profile=True), "t.py", "a.py", as_json=False, watch=True)
    with pytest.raises(UsageError, match="--profile"):
        evaluate_batch(Request(profile=True), "x.jsonl", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("absent.py", "my good.py"), "absent.py"),
        (("task.py", "absent.py"), "absent.py"),
        (("task.py", "my good.py", "--shape", "{"), "--shape is not JSON"),
        (("task.py", "my good.py", "--shape", "[]"), "--shape is not an object"),
        (("task.py", "my good.py", "--shape", '{"dims": 1}'), "did you mean dim?"),
        (("task.py", "my good.py", "--device", "gpu"), "no device"),
    ],
)
def test_a_replay_that_cannot_be_is_bad_usage_in_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["replay", *words])
    with pytest.raises(SystemExit) as raised:
        replay.main()
    assert raised.value.code == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert len(printed.err.splitlines()) == 1
