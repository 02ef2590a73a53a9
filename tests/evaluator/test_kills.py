"""kill -9 of any of the evaluator's processes leaves no process, lock or file, and the others recover or say so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evaluator import Evaluator, EvaluatorConfig
from evaluator.config import SandboxConfig
from evaluator.device import DeviceLock, open_device
from evaluator.worker.process import ROOT
from tasks.records import Candidate, Task

SLOW = """
import time, torch
from torch import nn
class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.n = 0
    def forward(self, x):
        self.n += 1
        time.sleep(0.05 if self.n > 2 else 0)
        return torch.relu(self.fc(x))
"""

JUDGE = """
import os, sys, threading, time
from evaluator import Evaluator, EvaluatorConfig
from evaluator.config import TimingConfig
from tasks.records import Candidate, Task
evaluator = Evaluator(config=EvaluatorConfig(timing=TimingConfig(half_width=0.0001, cap_s=60)))
task = Task(id="file:t", source=os.environ["TASK_SOURCE"])
def tell():
    while evaluator._zygote is None or not evaluator._zygote.pid: time.sleep(0.01)
    print(evaluator._zygote.pid, flush=True)
threading.Thread(target=tell, daemon=True).start()
print(evaluator.evaluate(task, Candidate(source=os.environ["SLOW"])).to_json(), flush=True)
"""


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Process ids below one, the whole tree."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            if parent == pid:
                found += [int(entry), *descendants(int(entry))]
    return found


def gone(pids: list[int]) -> bool:
    return all(state(pid) in ("", "Z", "X") for pid in pids)


@pytest.fixture
def judge(task: Task) -> Iterator[tuple[subprocess.Popen[bytes], int, list[int]]]:
    """A judge in the middle of a timing: its process, its zygote's id and all process ids below it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TASK_SOURCE": task.source, "SLOW": textwrap.dedent(SLOW)}
    with subprocess.Popen([sys.executable, "-c", JUDGE], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        zygote = int(process.stdout.readline())
        assert wait_until(lambda: len(descendants(zygote)) >= 5), "two workers with their intermediaries, one server"
        time.sleep(0.3)
        try:
            yield process, zygote, descendants(process.pid)
        finally:
            process.kill()


def free_lock() -> bool:
    lock = DeviceLock(open_device("cpu").lock_path)
    try:
        with lock.held(10.0):
            return True
    finally:
        lock.close()


def test_a_killed_judge_leaves_no_process_lock_or_file(judge: tuple[subprocess.Popen[bytes], int, list[int]]) -> None:
    process, _, below = judge
    before = set(os.listdir(tempfile.gettempdir()))
    process.send_signal(signal.SIGKILL)
    assert wait_until(lambda: gone(below)), [(pid, state(pid)) for pid in below]
    assert free_lock()
    assert not {name for name in set(os.listdir(tempfile.gettempdir())) - before if name.startswith("kontrast")}


def test_a_machine_without_mount_namespaces_keeps_no_folder_either(task: Task, quick: EvaluatorConfig) -> None:
    """There workers write into a real folder: it goes with the worker, and the one above it with the zygote."""
    bare = quick.model_copy(update={"sandbox": SandboxConfig(layers=("landlock", "seccomp"))})
    before = set(os.listdir(tempfile.gettempdir()))
    with Evaluator(config=bare) as evaluator:
        assert (
            evaluator.evaluate(task, Candidate(source="import no_such_thing\nclass ModelNew: pass")).reason == "crash"
        )
        made = {name for name in set(os.listdir(tempfile.gettempdir())) - before if name.startswith("kontrast-")}
        assert [os.listdir(os.path.join(tempfile.gettempdir(), name)) for name in made] == [[]]
    assert wait_until(lambda: not any(os.path.exists(os.path.join(tempfile.gettempdir(), name)) for name in made))


def test_a_killed_zygote_takes_all_with_it_and_is_told(judge: tuple[subprocess.Popen[bytes], int, list[int]]) -> None:
    """In the candidate's turn that is its tampering, in the reference's (the candidate is stopped) nobody's."""
    process, zygote, _ = judge
    below = descendants(zygote)
    os.kill(zygote, signal.SIGKILL)
    assert wait_until(lambda: gone(below)), [(pid, state(pid)) for pid in below]
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    assert told["reason"] in ("tampering", "evaluator_lost"), told["message"]


def test_an_evaluator_recovers_from_a_killed_zygote_or_server(task: Task, quick: EvaluatorConfig) -> None:
    with Evaluator(config=quick) as evaluator:
        assert accepted(evaluator, task)
        os.kill(evaluator.reference(task).arm.child.pid, signal.SIGKILL)
        assert accepted(evaluator, task)
        os.kill(evaluator.zygote().pid, signal.SIGKILL)
        assert wait_until(lambda: not evaluator.zygote_alive())
        assert accepted(evaluator, task)


def accepted(evaluator: Evaluator, task: Task) -> bool:
    result = evaluator.evaluate(task, Candidate(source=SLOW.replace("0.05", "0")))
    assert result.outcome == "accepted", result.message
    return True


def test_the_lock_is_held_by_one_and_free_when_its_holder_dies(tmp_path: Path) -> None:
    path = str(tmp_path / "device")
    Path(path).touch()
    hold = f"import fcntl, time; f = open({path!r}); fcntl.flock(f, 2); print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    lock = DeviceLock(path)
    with pytest.raises(Exception, match="another evaluator"), lock.held(0.05):
        pass
    holder.kill()
    holder.wait()
    with lock.held(5.0) as waited_s:
        assert waited_s < 5.0
    lock.close()


def test_turns_go_side_by_side_and_a_timing_excludes_them_and_is_not_kept_waiting(tmp_path: Path) -> None:
    """Two evaluators take turns without a pause between them; a third times."""
    path = str(tmp_path / "device")
    Path(path).touch()
    inside, together, beside_timing = [0], [0], [0]
    timing, done = threading.Event(), threading.Event()

    def turns(lock: DeviceLock) -> None:
        while not done.is_set():
            with lock.turn(10.0):
                inside[0] += 1
                together[0] = max(together[0], inside[0])
                beside_timing[0] += timing.is_set()
                time.sleep(0.002)
                inside[0] -= 1

    locks = [DeviceLock(path, shared=True) for _ in range(3)]
    threads = [threading.Thread(target=turns, args=(lock,)) for lock in locks[:2]]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            with locks[2].held(10.0) as waited_s:
                timing.set()
                with locks[2].turn(0.0) as own_s:
                    time.sleep(0.01)
                timing.clear()
            assert waited_s < 5.0
            assert own_s == 0.0
            time.sleep(0.02)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert together[0] == 2
    assert beside_timing[0] == 0
    for lock in locks:
        lock.close()


def test_a_turn_that_waits_for_a_build_gives_the_device_up(tmp_path: Path) -> None:
    path = str(tmp_path / "device")
    Path(path).touch()
    builder, other = (DeviceLock(path, shared=True) for _ in range(2))
    with builder.turn(1.0):
        with pytest.raises(Exception, match="another evaluator"), other.held(0.05):
            pass
        with builder.lent(1.0), other.held(1.0):
            pass
        with pytest.raises(Exception, match="another evaluator"), other.held(0.05):
            pass
    builder.close()
    other.close()


def test_a_lock_that_is_made_can_be_taken_by_every_user_of_the_machine(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        DeviceLock(str(tmp_path / "device")).close()
    finally:
        os.umask(before)
    assert (tmp_path / "device").stat().st_mode & 0o444 == 0o444
