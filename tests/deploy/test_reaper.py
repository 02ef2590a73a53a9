"""The reaper: whatever the command started is gone after it, and nothing else is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.graph.reaper import MARK, marked, reaping
from tasks.integrity import project_root

SLEEPER = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
COMMAND = f"""
import os, pathlib, subprocess, sys, time
from deploy.graph.reaper import MARK, reaping
with reaping(os.environ, [pathlib.Path(name) for name in sys.argv[1:]]):
    subprocess.Popen({SLEEPER!r}, start_new_session=True)
    print(os.environ[MARK], flush=True)
    time.sleep(600)
"""


def wait_until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_end_of_the_block_ends_what_started_inside() -> None:
    environment = dict(os.environ)
    outside = subprocess.Popen(SLEEPER)
    with reaping(environment):
        mark = environment[MARK]
        inside = subprocess.Popen(SLEEPER, env=environment, start_new_session=True)
        assert marked(mark) == [inside.pid]
    try:
        assert inside.wait(timeout=10) == -signal.SIGKILL
        assert MARK not in environment
        assert outside.poll() is None
    finally:
        outside.kill()
        outside.wait()


def test_a_block_that_started_nothing_ends_at_once() -> None:
    start = time.monotonic()
    with reaping(dict(os.environ)):
        pass
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_whatever_ends_the_command_ends_what_it_started(sig: signal.Signals, tmp_path: Path) -> None:
    """Processes, and folders of weights in memory; what is beside these stays."""
    environment = {**os.environ, "PYTHONPATH": str(project_root())}
    weights, beside = tmp_path / "kontrast-r1", tmp_path / "kontrast-r2"
    for folder in (weights, beside):
        folder.mkdir()
        (folder / "policy-0.1.safetensors").touch()
    arguments = [sys.executable, "-c", COMMAND, str(weights), str(tmp_path / "never made")]
    command = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
    assert command.stdout is not None
    mark = command.stdout.readline().strip()
    wait_until(lambda: len(marked(mark)) == 1)
    command.send_signal(sig)
    command.wait(timeout=30)
    wait_until(lambda: not marked(mark))
    wait_until(lambda: not weights.exists())
    assert list(beside.iterdir())
