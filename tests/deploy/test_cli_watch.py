"""`kontrast evaluate --watch`: a line each save, whatever the files are for a moment, and an end by Ctrl-C."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.evaluation import Request, evaluate_one
from deploy.cli.watch import Speed, change, speed_of, wait_for_save
from tasks.errors import UsageError
from tasks.records import Evaluation, Measurement, Sweep

ROOT = Path(__file__).resolve().parents[2]
TASK = textwrap.dedent("""
    import torch
    from torch import nn
    dim = 256
    class Model(nn.Module):
        def forward(self, x):
            return x * 2 + x
    def get_inputs():
        return [torch.randn(64, dim)]
    def get_init_inputs():
        return []
""")  # fmt: skip
GOOD = textwrap.dedent("""
    import torch
    from torch import nn
    class ModelNew(nn.Module):
        def forward(self, x):
            return x * 3
""")  # fmt: skip


class Watch:
    """A running `kontrast evaluate --watch` with its lines as they come."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli.main", "evaluate", *words, "--watch", "--protocol", "reward"], cwd=ROOT,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def line(self, timeout_s: float = 60.0) -> str:
        """The next line of standard output."""
        return self._lines.get(timeout=timeout_s)

    def quiet(self, seconds: float) -> bool:
        """Whether no line comes for so long."""
        try:
            self._lines.get(timeout=seconds)
        except queue.Empty:
            return True
        return False

    def interrupt(self) -> tuple[int, str]:
        """Ctrl-C, as a terminal sends it to the whole group; the exit code and standard error."""
        os.killpg(self.process.pid, signal.SIGINT)
        _, text = self.process.communicate(timeout=30)
        return self.process.returncode, text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "good.py").write_text(GOOD)
    return tmp_path


@pytest.fixture
def watch(folder: Path) -> Iterator[Watch]:
    running = Watch(str(folder / "task.py"), str(folder / "good.py"))
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()


def test_each_save_is_one_line_and_ctrl_c_ends_well(watch: Watch, folder: Path) -> None:
    candidate = folder / "good.py"
    assert "  accepted " in watch.line()
    begin = time.monotonic()
    candidate.write_text(GOOD.replace("x * 3", "x * 2"))
    line = watch.line()
    assert "  rejected incorrect" in line
    assert ", was accepted" in line
    assert time.monotonic() - begin < 10
    candidate.write_text("class ModelNew(:")
    assert "  rejected contract" in watch.line()
    candidate.write_bytes(b"\x00\xff")
    assert "  not evaluated: " in watch.line()
    candidate.unlink()
    assert watch.quiet(1.0)
    replacement = folder / "new.py"
    replacement.write_text(GOOD)
    replacement.rename(candidate)
    line = watch.line()
    assert "  accepted " in line
    assert "% against the last accepted" in line
    (folder / "task.py").write_text(TASK + "def broken(:\n")
    assert "does not parse" in watch.line()
    (folder / "task.py").write_text(TASK.replace("x * 2 + x", "x * 3"))
    line = watch.line()
    assert "  accepted " in line
    assert "% against the last" in line
    code, text = watch.interrupt()
    assert code == 0
    assert "Traceback" not in text
    assert "watching " in text


def test_ctrl_c_in_the_middle_of_an_evaluation_leaves_nothing(folder: Path, below: Callable[[int], list[int]]) -> None:
    (folder / "slow.py").write_text("import time\ntime.sleep(20)\n" + GOOD)
    watch = Watch(str(folder / "task.py"), str(folder / "slow.py"))
    try:
        deadline = time.monotonic() + 60
        while len(below(watch.process.pid)) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.0)
        family = below(watch.process.pid)
        code, text = watch.interrupt()
    finally:
        watch.process.kill()
    assert code == 0
    assert "Traceback" not in text
    deadline = time.monotonic() + 15
    while any(Path(f"/proc/{pid}/task").is_dir() for pid in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}/task").is_dir() for pid in family)


def test_a_file_counts_as_saved_when_it_no_longer_changes(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("a")
    seen = wait_for_save([path], None)
    written = threading.Event()

    def write() -> None:
        path.unlink()
        time.sleep(0.15)
        with path.open("w") as file:
            for _ in range(10):
                time.sleep(0.04)
                file.write("line\n")
                file.flush()
        written.set()

    thread = threading.Thread(target=write)
    thread.start()
    found = wait_for_save([path], seen)
    thread.join()
    assert written.is_set()
    assert found[0][1] == 50


def _accepted(speedup: float, width: float = 0.01) -> Evaluation:
    measured = Measurement(
        speedup=speedup, ci_low=speedup - width, ci_high=speedup + width, reference_ms=1.0, candidate_ms=1.0, pairs=1
    )
    return Evaluation(outcome="accepted", step="time", measurement=measured, task_id="t", task_hash="0",
                      candidate_hash="0")  # fmt: skip


REJECTED = Evaluation(
    outcome="rejected", reason="incorrect", step="check", task_id="t", task_hash="0", candidate_hash="0"
)


@pytest.mark.parametrize(
    ("result", "last", "speed", "says"),
    [
        (_accepted(2.0), None, None, ""),
        (_accepted(2.2), _accepted(2.0), Speed(2.0, 1.99, 2.01), ", +10.0% against the last"),
        (_accepted(2.01), _accepted(2.0), Speed(2.0, 1.99, 2.01), ", +0.5% against the last (within the intervals)"),
        (_accepted(1.0), REJECTED, Speed(2.0, 1.99, 2.01), ", was rejected, -50.0% against the last accepted"),
        (_accepted(1.0), REJECTED, None, ", was rejected"),
        (REJECTED, _accepted(2.0), Speed(2.0, 1.99, 2.01), ", was accepted"),
        (REJECTED, REJECTED, None, ""),
        (Sweep.of([_accepted(4.0)]), Sweep.of([_accepted(2.0)]), Speed(2.0, 2.0, 2.0), ", +100.0% against the last"),
    ],
)
def test_the_change_against_the_last(result: Any, last: Any, speed: Speed | None, says: str) -> None:
    assert change(result, last, speed) == says


def test_only_what_was_accepted_has_a_speed() -> None:
    assert speed_of(_accepted(2.0, 0.5)) == Speed(2.0, 1.5, 2.5)
    assert speed_of(REJECTED) is None
    assert speed_of(Sweep.of([_accepted(2.0), REJECTED])) is None


@pytest.mark.parametrize(
    ("task", "candidate", "options", "says"),
    [
        ("task.py", "-", {}, "standard input"),
        ("task.py", "absent.py", {}, "absent.py is not a file"),
        ("absent.py", "good.py", {}, "absent.py is not a file"),
        ("task.py", ".", {}, "is not a file"),
        ("good.py", "good.py", {}, "is not a task"),
        ("procedural:no_such/17", "good.py", {}, "no_such"),
        ("task.py", "good.py", {"seed": "00"}, "--seed"),
        ("task.py", "good.py", {"protocol": "paper"}, "half an hour"),
        ("procedural:row_norm/17", "seed:inplace", {}, "nothing to watch"),
    ],
)
def test_what_cannot_be_watched_is_bad_usage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, task: str, candidate: str, options: dict[str, str], says: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError) as raised:
        evaluate_one(Request(**options), task, candidate, as_json=False, watch=True)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "words", [("--json", "task.py", "good.py"), ("--batch", "x.jsonl"), ("task.py", "--control", "1")]
)
def test_watch_goes_with_one_candidate_and_lines(folder: Path, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli.main", "evaluate", "--watch", *words], cwd=folder, text=True,
        capture_output=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, len(done.stdout.splitlines())) == (2, int("--json" in words))
    assert len(done.stderr.splitlines()) == 1
