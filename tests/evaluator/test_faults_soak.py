"""Faulty candidates in a row: each gets a typed outcome within its deadline, leaves nothing behind, and the evaluator
measures the reference against itself as before.

Every process of the evaluator is known by a word in its environment, which whatever it forks keeps; files are looked
for by a word in their names, in every folder that a candidate might reach.
"""

from __future__ import annotations

import os
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from evaluator import Evaluator, EvaluatorConfig
from evaluator.config import SandboxConfig
from tasks.records import Candidate, Evaluation, Task

MIB = 1 << 20
LONGEST_S = 20.0
"""The longest that one may take: the first call's deadline, the memory limit's watch and what surrounds them."""

BODY = """
import ctypes, os, signal, subprocess, sys, threading, time
import torch
from torch import nn
MARK = "{mark}"
{top}
class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
        {init}
    def forward(self, x):
        {forward}
        return torch.relu(self.fc(x))
"""


@dataclass(frozen=True)
class Fault:
    """What one kind of candidate does, in one of several ways, and the reasons that it may be rejected for."""

    reasons: tuple[str, ...]
    ways: tuple[dict[str, str], ...]
    accepted: bool = field(default=False)
    """It may also be accepted: it does no harm."""


FAULTS = {
    "segfault": Fault(("crash",), (
        {"forward": "ctypes.string_at(0)"}, {"top": "ctypes.string_at(0)"}, {"init": "ctypes.memset(8, 0, 8)"},
        {"forward": "os.abort()"},
    )),
    "hang": Fault(("timeout",), (
        {"forward": "while True: pass"}, {"top": "time.sleep(1000)"}, {"init": "threading.Event().wait()"},
        {"forward": "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"},
    )),
    "fork": Fault(("crash", "timeout", "resource_abuse"), (
        {"top": "for _ in range(20):\n    if not os.fork(): time.sleep(1000)"},
        {"init": "pids = [os.fork() for _ in range(4)]; (0 in pids) and time.sleep(1000)"},
        {"forward": "os.fork() or time.sleep(1000)"},
    )),
    "memory": Fault(("resource_abuse", "crash"), (
        {"forward": "self.kept = [torch.ones(1 << 24) for _ in range(64)]; time.sleep(5)"},
        {"top": "kept = [bytearray(os.urandom(1 << 20) * 64) for _ in range(32)]; time.sleep(5)"},
    )),
    "disk": Fault(("crash", "resource_abuse"), (
        {"top": "with open(f'left-{MARK}', 'wb') as file:\n    while True: file.write(bytes(1 << 20))"},
        {"forward": "open(f'/tmp/left-{MARK}', 'wb').write(bytes(1 << 30))"},
        {"top": "for place in ('/dev/shm', '/var/tmp', '/', '/root', os.getcwd()):\n"
                "    try: open(f'{place}/left-{MARK}', 'w').write('x')\n    except OSError: pass\nraise SystemExit"},
    )),
    "flood": Fault((), (
        {"top": "os.write(1, b'x' * (1 << 20)); os.write(2, b'x' * (1 << 20))"},
        {"forward": "print('flood ' * 100000); sys.stderr.write('flood ' * 100000)"},
    ), accepted=True),
    "kill parent": Fault(("crash", "tampering", "resource_abuse"), (
        {"forward": "os.kill(os.getppid(), signal.SIGKILL); time.sleep(0.2)"}, {"top": "os.kill(-1, signal.SIGKILL)"},
        {"init": "os.killpg(0, signal.SIGKILL)"},
    )),
    "children": Fault(("crash", "resource_abuse"), (
        {"top": "subprocess.Popen(['sleep', '1000'], start_new_session=True)"},
        {"init": "pid = os.fork()\n        if not pid: os.setsid(); os.fork(); time.sleep(1000)"},
        {"forward": "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])"},
        {"top": "if not os.fork():\n    os.fork() and os._exit(0)\n    time.sleep(1000)"},
    )),
}  # fmt: skip


class Scene:
    """The evaluator, and what is there beside it before the first candidate."""

    def __init__(self, evaluator: Evaluator, task: Task, mark: str) -> None:
        self.evaluator = evaluator
        self.task = task
        self.mark = mark
        self.control()
        self.processes = len(self.marked())
        self.descriptors = len(os.listdir("/proc/self/fd"))
        self.memory = self.resident()

    def marked(self) -> list[int]:
        """Processes that carry the mark, this one left out: the evaluator's and all that came of them."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                try:
                    carries = self.mark.encode() in Path(f"/proc/{entry}/environ").read_bytes()
                    alive = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
                except OSError:
                    continue
                found += [int(entry)] if carries and alive else []
        return found

    def resident(self) -> int:
        """Bytes of private memory of this process and the evaluator's."""
        total = 0
        for pid in (os.getpid(), *self.marked()):
            try:
                fields = Path(f"/proc/{pid}/statm").read_text().split()
            except OSError:
                continue
            total += (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGESIZE")
        return total

    def files(self) -> list[str]:
        """Files with the mark, wherever a candidate might have put them."""
        places = ["/", "/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~"), os.getcwd(), tempfile.gettempdir()]
        return [name for place in places for name in os.listdir(place) if self.mark in name]

    def control(self) -> Evaluation:
        found = self.evaluator.control(self.task)
        assert found.outcome == "accepted", found.message
        assert found.measurement is not None
        return found

    def faulty(self, kind: str, number: int) -> Evaluation:
        way = {"top": "", "init": "pass", "forward": "pass", **FAULTS[kind].ways[number % len(FAULTS[kind].ways)]}
        source = textwrap.dedent(BODY).format(mark=self.mark, **way) + f"\n# {kind} {number}\n"
        return self.evaluator.evaluate(self.task, Candidate(source=source))

    def left(self) -> str:
        """What is there that was not before the first candidate; empty for nothing."""
        deadline = time.monotonic() + 5.0
        while len(self.marked()) > self.processes and time.monotonic() < deadline:
            time.sleep(0.05)  # a killed process takes a moment
        if len(self.marked()) > self.processes:
            return f"processes {self.marked()}, at first {self.processes}"
        if self.files():
            return f"files {self.files()}"
        if len(os.listdir("/proc/self/fd")) > self.descriptors:
            return f"{len(os.listdir('/proc/self/fd')) - self.descriptors} descriptors"
        if self.resident() > self.memory + 256 * MIB:
            return f"{(self.resident() - self.memory) // MIB} MiB of memory"
        return ""


@pytest.fixture
def scene(
    task: Task, quick: EvaluatorConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Scene]:
    mark = f"kontrast-soak-{os.getpid()}-{request.node.callspec.id}"
    monkeypatch.setenv("VIRTUAL_ENV", f"{os.environ.get('VIRTUAL_ENV', '')}#{mark}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = quick.model_copy(update={"sandbox": SandboxConfig(scratch_mib=64)})
    with Evaluator(config=config) as evaluator:
        running = Scene(evaluator, task, mark)
        yield running
    assert not running.marked(), "the evaluator itself leaves no process"
    assert not os.listdir(tmp_path), "nor a file"


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("each", [
    pytest.param(1, id="8"), pytest.param(63, id="504", marks=pytest.mark.slow),
])  # fmt: skip
def test_faulty_candidates_in_a_row_leave_nothing_and_harm_nobody(
    capfd: pytest.CaptureFixture[str], scene: Scene, each: int
) -> None:
    for kind, fault in FAULTS.items():
        for number in range(each):
            begin = time.monotonic()
            found = scene.faulty(kind, number)
            seen = f"{kind} {number}: {found.outcome} {found.reason}: {found.message}"
            assert time.monotonic() - begin < LONGEST_S, seen
            if found.outcome != "accepted" or not fault.accepted:
                assert (found.outcome, found.reason in fault.reasons) == ("rejected", True), seen
        left = scene.left()
        assert not left, f"after {kind}: {left}"
        control = scene.control().measurement
        assert control is not None
        assert control.ci_low <= 1.0 <= control.ci_high or abs(control.speedup - 1.0) < 0.1, f"after {kind}: {control}"
    assert "flood" not in capfd.readouterr().out
