"""`kontrast evaluate`: exit codes, what is printed where, batches, and bad input in one sentence."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import batch, evaluation, panel
from deploy.cli.evaluation import Request, evaluate_batch, evaluate_controls, evaluate_one
from deploy.cli.main import promises_object
from tasks.errors import UsageError
from tasks.records import Candidate, Evaluation, Measurement, Task
from tasks.reference_source import is_source

ROOT = Path(__file__).resolve().parents[2]
TASK = textwrap.dedent("""
    import torch
    from torch import nn
    class Model(nn.Module):
        def forward(self, x):
            return torch.relu(x) * 2 + x
    def get_inputs():
        return [torch.randn(64, 256)]
    def get_init_inputs():
        return []
""")  # fmt: skip
GOOD = textwrap.dedent("""
    import torch
    from torch import nn
    class ModelNew(nn.Module):
        def forward(self, x):
            return torch.where(x > 0, x * 3, x)
""")  # fmt: skip
MEASUREMENT = Measurement(
    speedup=1.734, ci_low=1.70, ci_high=1.76, reference_ms=2.5, candidate_ms=0.9, pairs=40, placements=5
)


class FakeJudge:
    """Accepts what says ACCEPT, and so on; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bytes | None]] = []
        self.made: list[tuple[str, dict[str, Any]]] = []

    def evaluate(self, task: Task, candidate: Candidate, *, seed: bytes | None = None) -> Evaluation:
        self.asked.append((task.id, candidate.source, seed))
        print("noise on standard output")
        common: dict[str, Any] = {
            "task_id": task.id, "task_hash": task.content_hash, "candidate_hash": candidate.content_hash,
            "isolation": ("landlock", "seccomp"), "labels": ("custom_kernel",), "precision": task.precision,
        }  # fmt: skip
        if "REJECT" in candidate.source:
            detail = {
                "output": "0", "index": [3, 7], "got": "0.5", "expected": "0.25", "error": "0.25", "allowed": "1e-06",
                "seed": "ab" * 16, "wrong_calls": 2, "calls": 2, "draw": "as_given", "defence": "error_budget",
            }  # fmt: skip
            return Evaluation(outcome="rejected", reason="incorrect", step="check", message="Wrong value.",
                              detail=detail, **common)  # fmt: skip
        if "UNSCORED" in candidate.source:
            return Evaluation(outcome="unscored", reason="device_fault", step="time", message="The device.", **common)
        return Evaluation(outcome="accepted", step="time", measurement=MEASUREMENT, **common)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> FakeJudge:
    fake = FakeJudge()

    @contextmanager
    def make(device: str, settings: dict[str, Any]) -> Iterator[FakeJudge]:
        fake.made.append((device, settings))
        yield fake

    monkeypatch.setattr(evaluation, "make_judge", make)
    return fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    for name in ("ACCEPT", "REJECT", "UNSCORED"):
        (tmp_path / f"{name.lower()}.py").write_text(GOOD + f"# {name}\n")
    return tmp_path


def _one(folder: Path, name: str, *, as_json: bool = True, **options: Any) -> int:
    paths = str(folder / "task.py"), str(folder / name)
    return evaluate_one(Request(**options), *paths, as_json=as_json, make=evaluation.make_judge)


@pytest.mark.parametrize(("name", "code"), [("accept.py", 0), ("reject.py", 1), ("unscored.py", 3)])
def test_the_exit_code_says_the_outcome_and_json_is_all_of_standard_output(
    judge: FakeJudge, folder: Path, capfd: pytest.CaptureFixture[str], name: str, code: int
) -> None:
    assert _one(folder, name) == code
    printed = capfd.readouterr()
    (line,) = printed.out.splitlines()
    assert Evaluation.from_json(line).outcome == {0: "accepted", 1: "rejected", 3: "unscored"}[code]
    assert "noise on standard output" in printed.err


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("speedup", "count", "code", "said"), [
    (1.0, 2, 0, "A judgement needs 50 of them."), (1.0, 50, 0, ""), (1.05, 50, 1, "the reference reads 1.050x"),
    (None, 2, 3, "None of 2 was measured"),
])  # fmt: skip
def test_a_reference_is_measured_against_itself(
    judge: FakeJudge, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool,
    speedup: float | None, count: int, code: int, said: str,
) -> None:  # fmt: skip
    def control(task: Task) -> Evaluation:
        common: dict[str, Any] = {"task_id": task.id, "task_hash": task.content_hash, "candidate_hash": ""}
        if speedup is None:
            return Evaluation(outcome="unscored", reason="device_fault", step="time", message="It is hot.", **common)
        timing = Measurement(
            speedup=speedup, ci_low=speedup * 0.9, ci_high=speedup / 0.9, reference_ms=1, candidate_ms=1, pairs=20
        )
        return Evaluation(outcome="accepted", step="time", measurement=timing, message="Right.", **common)

    monkeypatch.setattr(judge, "control", control, raising=False)
    path = str(folder / "task.py")
    assert evaluate_controls(Request(), path, count, as_json=as_json, make=evaluation.make_judge) == code
    out = capfd.readouterr().out
    if as_json:
        (line,) = out.splitlines()
        assert json.loads(line)["measured"] == (0 if speedup is None else count)
    else:
        first, *_ = lines = out.splitlines()
        assert first == ("1: device_fault. It is hot." if speedup is None else "1: accepted. Right.")
        assert len(lines) == count + 1 + bool(said and speedup)
        assert said in out


@pytest.mark.parametrize(("task", "stray", "evaluators"), [("task.py", "x.py", 1), ("", "", 1), ("task.py", "", 2)])
def test_controls_take_a_task_and_nothing_else(
    judge: FakeJudge, folder: Path, task: str, stray: str, evaluators: int
) -> None:
    path = str(folder / task) if task else ""
    with pytest.raises(UsageError, match="--control takes a task and nothing else"):
        evaluate_controls(
            Request(evaluators=evaluators), path, 1, as_json=False, stray=stray, make=evaluation.make_judge
        )


def test_options_reach_the_evaluator(judge: FakeJudge, folder: Path) -> None:
    _one(folder, "accept.py", device="cuda:1", protocol="paper", rules="any", dtype="bf16", seed="00ff")
    assert judge.made == [("cuda:1", {"protocol": "paper", "rules": "any"})]
    assert judge.asked[0][2] == b"\x00\xff"


def test_a_panel_of_an_acceptance_shows_what_was_measured(
    judge: FakeJudge, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _one(folder, "accept.py", as_json=False) == 0
    out = capfd.readouterr().out
    for part in ("accepted", "1.73x", "98% interval 1.70 to 1.76", "2.50 ms", "900 us", "40 pairs over 5 placements",
                 "custom_kernel", "landlock, seccomp"):  # fmt: skip
        assert part in out


def test_a_panel_of_a_rejection_shows_the_value_and_how_to_see_it_again(
    judge: FakeJudge, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _one(folder, "reject.py", as_json=False, dtype="fp16") == 1
    out = capfd.readouterr().out
    for part in ("rejected: incorrect", "index [3, 7]: got 0.5, expected 0.25", "0.25 against a budget of 1e-06",
                 "2 of 2"):  # fmt: skip
        assert part in out
    command = out.splitlines()[-1].split(": ", 1)[1]
    assert command == (f"kontrast evaluate {folder / 'task.py'} {folder / 'reject.py'} --dtype fp16 --seed {'ab' * 16}")


def test_a_panel_of_a_compile_failure_shows_the_compilers_lines() -> None:
    text = "k.cpp:3:5: error: 'y' was not declared\n" + "\n".join(f"note {i} [bold]" for i in range(30))
    failed = Evaluation(
        outcome="rejected", reason="compile_error", step="compile", message="A kernel does not compile.",
        detail={"compiler": text}, task_id="t", task_hash="0", candidate_hash="0",
    )  # fmt: skip
    stream = io.StringIO()
    panel.print_panel(failed, stream, command="again")
    shown = stream.getvalue()
    assert "k.cpp:3:5: error: 'y' was not declared" in shown
    assert "[bold]" in shown
    assert "more lines with --json" in shown
    assert "again" not in shown


def _batch(folder: Path, lines: list[Any], **options: Any) -> tuple[int, list[Any]]:
    path = folder / "cases.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    out = folder / "results.jsonl"
    code = evaluate_batch(Request(**options), str(path), str(out), make=evaluation.make_judge)
    return code, [json.loads(line) for line in out.read_text().splitlines()]


def test_a_batch_keeps_ids_and_order_and_evaluates_every_line(judge: FakeJudge, folder: Path) -> None:
    task = str(folder / "task.py")
    code, results = _batch(folder, [
        {"id": "a", "task": task, "candidate": str(folder / "reject.py")}, "",
        {"id": 7, "task": TASK, "candidate": GOOD},
        {"id": "a", "task": "task.py", "candidate": "accept.py"},
    ])  # fmt: skip
    assert code == 0
    assert [result["id"] for result in results] == ["a", 7, "a"]
    assert [result["evaluation"]["outcome"] for result in results] == ["rejected", "accepted", "accepted"]
    assert set(results[0]) == {"id", "evaluation"}
    assert len(judge.asked) == 3


def test_equal_lines_are_evaluated_again_each_time(judge: FakeJudge, folder: Path) -> None:
    line = {"id": 1, "task": "task.py", "candidate": "accept.py"}
    _batch(folder, [line, line, line])
    assert len(judge.asked) == 3


def test_an_unscored_line_makes_the_exit_code_three(judge: FakeJudge, folder: Path) -> None:
    line = {"id": 1, "task": "task.py", "candidate": "unscored.py"}
    code, results = _batch(folder, [line, {**line, "candidate": "accept.py"}])
    assert code == 3
    assert len(results) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 of"),
        ("[1]", "not an object"),
        ({"id": 1, "task": "task.py"}, "has no 'candidate'"),
        ({"id": 1, "task": "task.py", "candidate": "accept.py", "x": 1}, "unknown key 'x'"),
        ({"id": None, "task": "task.py", "candidate": "accept.py"}, "id is neither"),
        ({"id": 1, "task": 5, "candidate": "accept.py"}, "task is not a text"),
        ({"id": 1, "task": "task.py", "candidate": " "}, "candidate is not a text"),
        ({"id": 1, "task": "task.py", "candidate": "absent.py"}, "absent.py"),
        ({"id": 1, "task": "absent.py", "candidate": "accept.py"}, "absent.py"),
        ({"id": 1, "task": "kernelbench:9/999", "candidate": "accept.py"}, "kernelbench:9/999"),
        ({"id": 1, "task": "import torch\n", "candidate": "accept.py"}, "Model"),
        ({"id": 1, "task": "task.py", "candidate": "-"}, "standard input"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_before_anything_is_evaluated(
    judge: FakeJudge, folder: Path, shared_kernelbench: None, line: Any, says: str
) -> None:
    good = {"id": 0, "task": "task.py", "candidate": "accept.py"}
    with pytest.raises(UsageError, match="line 2 of") as raised:
        _batch(folder, [good, line])
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not judge.asked


@pytest.fixture
def shared_kernelbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KernelBench of one task, so that an unknown id is unknown whatever this machine has."""
    row = {"code": TASK, "level": 1, "name": "1_scale", "problem_id": 1}
    (tmp_path / "kernelbench.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setenv("KONTRAST_KERNELBENCH", str(tmp_path / "kernelbench.jsonl"))


def test_candidates_of_a_task_stay_on_one_evaluator_in_order() -> None:
    """Tasks a a b c b over two evaluators: a goes to 0, b to 1, c (2 against 1 lines) to 1, b stays on 1."""
    tasks = {name: Task(id=name, source=TASK + f"# {name}\nx{name} = 1\n") for name in "abc"}
    lines = [batch.Line(i, tasks[name], Candidate(source=GOOD)) for i, name in enumerate("aabcb")]
    assert batch.partition(lines, 2) == [[0, 1], [2, 3, 4]]
    assert batch.partition(lines, 1) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("text", "source"),
    [("task.py", False), ("a folder/with = signs.py", True), ("kernelbench:2/18", False), ("import torch", True),
     ("class ModelNew:\n    pass", True), ("seed:fast", False)],
)  # fmt: skip
def test_source_is_told_from_paths_and_ids(text: str, source: bool) -> None:
    assert is_source(text) is source


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"protocol": "sequental"}, "did you mean sequential?"),
        ({"rules": "loose"}, "strict, paper, any"),
        ({"dtype": "fp64"}, "did you mean fp16?"),
        ({"device": "gpu"}, "cuda:INDEX"),
        ({"seed": "xyz"}, "is no seed"),
        ({"size": "huge"}, "--size huge"),
    ],
)
def test_a_wrong_option_is_one_sentence(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        Request(**options)
    assert says in str(raised.value)


def test_options_that_do_not_fit_together_are_refused(judge: FakeJudge, folder: Path) -> None:
    task, good = str(folder / "task.py"), str(folder / "accept.py")
    with pytest.raises(UsageError, match="--batch"):
        evaluate_one(Request(), task, "", as_json=True)
    with pytest.raises(UsageError, match="--out"):
        evaluate_one(Request(), task, good, as_json=True, out="x")
    with pytest.raises(UsageError, match="unexpected argument"):
        evaluate_batch(Request(), "x.jsonl", "", stray=task)
    with pytest.raises(UsageError, match="--seed"):
        evaluate_batch(Request(seed="00"), "x.jsonl", "")
    with pytest.raises(UsageError, match="cannot write"):
        _batch_to(folder, "/no/such/folder/out")
    with pytest.raises(UsageError, match="is a folder"):
        evaluate_one(Request(), task, str(folder), as_json=True)


def _unreadable(folder: Path) -> list[tuple[str, str]]:
    """Things that a path can name beside a file of text, and what is said of each."""
    os.mkfifo(folder / "pipe")
    return [
        ("/proc/self/mem", "/proc/self/mem"), ("/dev/zero", "/dev/zero"), (str(folder / "pipe"), "pipe"),
        ("x" * 5000, "too long"), (str(folder), str(folder)), ("no\0name", "name"), ("gone.py", "gone.py"),
    ]  # fmt: skip


@pytest.mark.timeout(60)
def test_a_path_to_anything_but_text_is_one_sentence(judge: FakeJudge, folder: Path) -> None:
    """As task, candidate or batch; nothing blocks, and nothing is read without end."""
    task, good = str(folder / "task.py"), str(folder / "accept.py")
    for path, says in _unreadable(folder):
        for use in (
            lambda path: evaluate_one(Request(), path, good, as_json=True),
            lambda path: evaluate_one(Request(), task, path, as_json=True),
            lambda path: evaluate_batch(Request(), path, ""),
        ):
            with pytest.raises(UsageError) as raised:
                use(path)
            assert says in str(raised.value) or path[:100] in str(raised.value)


def test_a_batch_may_come_through_a_pipe(judge: FakeJudge, folder: Path) -> None:
    line = json.dumps({"id": 1, "task": str(folder / "task.py"), "candidate": str(folder / "accept.py")})
    read, write = os.pipe()
    os.write(write, line.encode())
    os.close(write)
    out = folder / "out.jsonl"
    assert evaluate_batch(Request(), f"/dev/fd/{read}", str(out), make=evaluation.make_judge) == 0
    os.close(read)
    assert json.loads(out.read_text())["id"] == 1


def _batch_to(folder: Path, out: str) -> int:
    path = folder / "cases.jsonl"
    path.write_text(json.dumps({"id": 1, "task": "task.py", "candidate": "accept.py"}) + "\n")
    return evaluate_batch(Request(), str(path), out, make=evaluation.make_judge)


def test_with_plain_cuda_each_evaluator_has_a_gpu_of_its_own() -> None:
    assert Request(device="cuda", evaluators=2).devices() == ["cuda:0", "cuda:1"]
    assert Request(device="cuda:1", evaluators=2).devices() == ["cuda:1", "cuda:1"]
    assert Request(evaluators=1).devices() == ["cpu"]


def _kontrast(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli.main", "evaluate", *words], cwd=ROOT, input=stdin, text=True,
        capture_output=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


BAD_USAGE = [
    ("absent.py", "absent.py"), ("kernelbench:9/999", "absent.py"), (), ("a.py",), ("a.py", "b.py", "--rules", "x"),
    ("--batch", "absent.jsonl"), ("a.py", "b.py", "--device", "cuda:99"),
]  # fmt: skip


@pytest.mark.parametrize("words", BAD_USAGE)
def test_bad_usage_is_one_sentence_and_exit_code_two(words: tuple[str, ...], shared_kernelbench: None) -> None:
    done = _kontrast(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", [*BAD_USAGE, ("--nosuch",), ("a.py", "b.py", "c.py"), ("a.py", "--control", "x"), ("--device",)]
)
def test_with_json_bad_usage_is_one_object(words: tuple[str, ...], shared_kernelbench: None) -> None:
    """Whether a file, an option's value or the parser refuses it, and where the option stands."""
    done = _kontrast("--json", *words) if words == ("--device",) else _kontrast(*words, "--json")
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["exit_code"] == 2
    assert found["error"] in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "promised"),
    [("evaluate a b --json", True), ("-v evaluate --json", True), ("evaluate a b", False),
     ("evaluate a -- --json", False), ("store top --json", False)],
)  # fmt: skip
def test_an_object_is_promised_by_one_option_of_one_command(line: str, promised: bool) -> None:
    assert promises_object(line.split()) is promised


def test_a_real_evaluation_from_the_command_line(folder: Path) -> None:
    done = _kontrast(str(folder / "task.py"), "-", "--json", "--protocol", "reward", stdin=GOOD)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["outcome"] == "accepted"
    assert found["measurement"]["ci_low"] <= found["measurement"]["speedup"] <= found["measurement"]["ci_high"]
    assert found["isolation"]


def test_a_wrong_candidate_is_rejected_with_the_command_that_shows_it_again(folder: Path) -> None:
    done = _kontrast(str(folder / "task.py"), "-", stdin=GOOD.replace("x * 3", "x * 2"))
    assert done.returncode == 1, done.stderr
    assert "first wrong" in done.stdout
    assert "--seed" in done.stdout.splitlines()[-1]


def test_a_real_batch_over_two_evaluators(folder: Path) -> None:
    other = TASK.replace("* 2 + x", "* 3")
    lines = [
        {"id": i, "task": task, "candidate": candidate}
        for i, (task, candidate) in enumerate([
            ("task.py", GOOD), (other, GOOD), ("task.py", GOOD.replace("3", "4")),
            (other, GOOD.replace("x * 3, x", "x * 3, x * 0")), ("task.py", "class ModelNew(:\n"), (other, "x = 1\n"),
        ])
    ]  # fmt: skip
    (folder / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = _kontrast("--batch", str(folder / "cases.jsonl"), "--evaluators", "2", "--protocol", "reward")
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["id"] for result in results] == [0, 1, 2, 3, 4, 5]
    outcomes = [result["evaluation"]["outcome"] for result in results]
    assert outcomes == ["accepted", "rejected", "rejected", "accepted", "rejected", "rejected"]
    assert results[5]["evaluation"]["reason"] == "contract"


def test_nothing_outlives_a_killed_batch(folder: Path, below: Callable[[int], list[int]]) -> None:
    sleeper = "import time\ntime.sleep(20)\n" + GOOD
    other = TASK.replace("* 2 + x", "* 3")
    lines = [{"id": i, "task": task, "candidate": sleeper} for i, task in enumerate(["task.py", other])]
    (folder / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    owner = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli.main", "evaluate", "--evaluators", "2", "--batch", folder / "cases.jsonl"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert _until(lambda: len(below(owner.pid)) >= 8, 60)
        family = below(owner.pid)
    finally:
        owner.kill()
        owner.wait()
    assert _until(lambda: not any(Path(f"/proc/{pid}/task").is_dir() for pid in family), 15)


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False
