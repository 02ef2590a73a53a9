"""A program never outlives its owner, however the owner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.lifeline import spawn

ROOT = Path(__file__).resolve().parents[2]

OWNER = """
import sys, time
from tasks.lifeline import spawn
owned = spawn([sys.executable, "-c", {program!r}])
print("up", flush=True)
time.sleep(60)
"""

PROGRAM = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path({pid_file!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_program_and_its_children_end_with_a_killed_owner(tmp_path: Path, sig: signal.Signals) -> None:
    pid_file = tmp_path / "pids"
    program = PROGRAM.format(pid_file=str(pid_file))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER.format(program=program)], env=env, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        assert wait_until(lambda: pid_file.exists() and len(pid_file.read_text().split()) == 2)
        pids = [int(word) for word in pid_file.read_text().split()]
        assert all(alive(pid) for pid in pids)
        owner.send_signal(sig)
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


def test_exit_code_is_the_programs() -> None:
    assert spawn([sys.executable, "-c", "raise SystemExit(7)"]).process.wait(10) == 7


def test_a_program_that_cannot_run_ends_with_127() -> None:
    assert spawn(["/no/such/program"]).process.wait(10) == 127


def test_stop_is_idempotent_and_reaps() -> None:
    owned = spawn([sys.executable, "-c", "import time; time.sleep(60)"])
    assert owned.stop() == owned.stop()
    assert owned.poll() is not None
