"""No wait is silent: what is waited for is said while it lasts, and nothing is said of what is quick."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.display import Display
from deploy.cli.waiting import EVERY_S, QUIET_S, waiting_told
from evaluator.activity import Activity
from evaluator.compile import BuildDesk
from evaluator.compile.request import CompileResult

ROOT = Path(__file__).resolve().parents[2]
TASK = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
def get_inputs():
    return [torch.randn(64, 256)]
def get_init_inputs():
    return []
"""
SLOW = """
import time
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        time.sleep(3)
        return torch.relu(x) + 1
"""


def test_a_line_comes_at_least_every_fifteen_seconds() -> None:
    assert EVERY_S + QUIET_S <= 15


def test_the_innermost_wait_is_said_with_its_age_and_limit(capfd: pytest.CaptureFixture[str]) -> None:
    activity = Activity()
    with (
        waiting_told(activity, every_s=0.05, quiet_s=0.1),
        activity.doing("the evaluation"),
        activity.doing("the first call", 120),
    ):
        time.sleep(0.4)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert set(printed.err.splitlines()) == {"waiting for the first call: 0 s so far, at most 120 s"}
    assert activity.now is None


def test_nothing_is_said_of_what_is_quick_or_over(capfd: pytest.CaptureFixture[str]) -> None:
    activity = Activity()
    with waiting_told(activity, every_s=0.02, quiet_s=0.3):
        with activity.doing("a quick step"):
            time.sleep(0.1)
        time.sleep(0.3)
    assert capfd.readouterr().err == ""


def test_an_activity_ends_whatever_ends_it() -> None:
    activity = Activity()
    with pytest.raises(KeyError), activity.doing("a"), activity.doing("b"):
        raise KeyError
    assert activity.now is None


def test_a_build_in_the_middle_of_a_call_is_said() -> None:
    activity, seen = Activity(), []

    class Pool:
        def serve(self, message: dict[str, Any]) -> tuple[dict[str, Any], None, CompileResult]:
            assert activity.now is not None
            seen.append(activity.now.words)
            return message, None, CompileResult(name="k", seconds=0.0)

    desk = BuildDesk(Pool, activity)  # type: ignore[arg-type]  # the part of a pool that a desk uses
    with activity.doing("the candidate's first call"):
        desk.serve({})
        assert activity.now is not None
        assert activity.now.words == "the candidate's first call"
    assert seen == ["a kernel to be compiled (load_inline)"]


def test_verbose_says_each_step_with_its_time_on_standard_error(tmp_path: Path) -> None:
    for name, text in (("task.py", TASK), ("slow.py", SLOW)):
        (tmp_path / name).write_text(text)
    words = ["evaluate", str(tmp_path / "task.py"), str(tmp_path / "slow.py"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli.main", *words, "-v"], cwd=ROOT, text=True, capture_output=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert len(done.stdout.splitlines()) == 1
    said = [re.sub(r".*evaluator\.activity: ", "", line) for line in done.stderr.splitlines()]
    assert "begin: the candidate's first call" in said
    (took,) = [line for line in said if line.endswith(" s: the candidate's first call")]
    assert float(took.split()[0]) >= 3.0
    waits = [line for line in done.stderr.splitlines() if line.startswith("waiting for the ")]
    assert waits, "more than fifteen seconds passed in silence"


def test_a_stage_that_says_nothing_is_named_again(capfd: pytest.CaptureFixture[str]) -> None:
    with Display(10.0, live=False, silence_s=0.2) as display:
        display.stage("starting Ray")
        time.sleep(0.7)
        display.stage("starting the learner")
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "starting Ray"
    assert lines[-1] == "starting the learner"
    assert set(lines[1:-1]) <= {"starting Ray: 0 s so far", "starting Ray: 1 s so far"}
    assert len(lines) > 3


def test_a_display_is_never_silent_for_long_and_never_louder_than_asked() -> None:
    """The reminder looks twelve times in its interval, which is two seconds above that of progress."""
    assert Display(10.0, live=False).silence_s * 13 / 12 <= 15
    assert Display(60.0, live=False).silence_s > 60


@pytest.mark.parametrize(("command", "status"), [("sleep 11", 0), ("exit 3", 3), ("false", 1)])
def test_an_installing_script_says_what_it_waits_for(command: str, status: int) -> None:
    script = f'set -eu; . scripts/waited.sh; waited "installing torch" sh -c "{command}"; echo done'
    done = subprocess.run(["sh", "-c", script], cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.returncode == status
    said = ["installing torch"] + ["installing torch: 10 s so far"] * (command == "sleep 11")
    assert done.stdout.splitlines() == said + ["done"] * (status == 0)


@pytest.mark.parametrize("name", ["install_cpu.sh", "install_gpu.sh"])
def test_no_step_of_an_installation_is_silent(name: str) -> None:
    steps = [line for line in (ROOT / "scripts" / name).read_text().splitlines() if "$pip install" in line]
    assert steps
    assert all("waited " in line for line in steps), steps
