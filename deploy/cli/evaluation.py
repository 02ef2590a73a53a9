"""What `kontrast evaluate` does, apart from its options: read task and candidate, evaluate, print, exit code.

Invariants: standard output carries results only (whatever else writes there, a library or a child, is turned to
standard error); everything that can be wrong with the input is found before the first evaluation and said in one
sentence; no answer comes from an earlier evaluation.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, get_args

import typer

from deploy.cli.waiting import waiting_told
from tasks.config import Section
from tasks.errors import UsageError
from tasks.records import Candidate, Evaluation, Sweep, Task
from tasks.records import evaluation as words
from tasks.records.base import stable_json
from tasks.records.task import Precision
from tasks.shapes import shape_words

if TYPE_CHECKING:
    from evaluator import Evaluator

BASELINES = ("eager", "compile", "graph")
EXIT_CODES = {"accepted": 0, "rejected": 1, "unscored": 3}
MAX_CANDIDATE_BYTES = 1 << 20

Size = Literal["cpu", "gpu"]


class Judge(Protocol):
    """The part of `evaluator.Evaluator` that is used here."""

    def evaluate(
        self, task: Task, candidate: Candidate, *, seed: bytes | None = None, against: Candidate | None = None,
        baseline: words.Baseline = "eager", profile: bool = False,
    ) -> Evaluation:  # fmt: skip
        """Judges one candidate."""

    def control(self, task: Task) -> Evaluation:
        """Measures the reference against itself."""


Result = Evaluation | Sweep
"""What one candidate gets: an evaluation, or with `--shapes` one for each shape and their summary."""

MakeJudge = Callable[[str, dict[str, Any]], AbstractContextManager[Judge]]
"""From a device's name and the evaluator's settings to an evaluator."""


@dataclass(frozen=True)
class Request:
    """The options of the command, checked as soon as it is made. Raises UsageError."""

    device: str = "cpu"
    protocol: str = "sequential"
    rules: str = "strict"
    dtype: str = "fp32"
    size: str = ""
    kernelbench: str = ""
    seed: str = ""
    evaluators: int = 1
    shapes: str = ""
    against: str = ""
    baseline: str = "eager"
    profile: bool = False
    settings_words: tuple[str, ...] = ()
    """Settings of the evaluator as they were given, such as `--evaluator.threads 2`."""

    def __post_init__(self) -> None:
        _one_of("--protocol", self.protocol, get_args(words.Protocol))
        _one_of("--rules", self.rules, get_args(words.RulesName))
        _one_of("--dtype", self.dtype, get_args(Precision))
        if self.size:
            _one_of("--size", self.size, get_args(Size))
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device):
            raise UsageError(f"there is no device {self.device!r}: give cpu, cuda or cuda:INDEX")
        _one_of("--baseline", self.baseline, BASELINES)
        if self.baseline == "graph" and self.device == "cpu":
            raise UsageError("--baseline graph needs a CUDA device: give --device cuda, or --baseline compile")
        if self.baseline != "eager" and self.against:
            raise UsageError("--against times two candidates with each other: leave --baseline out")
        if self.seed and not re.fullmatch(r"([0-9a-f]{2}){1,64}", self.seed):
            raise UsageError(f"{self.seed!r} is no seed: give the hexadecimal digits that a rejection printed")
        self._check_settings()

    def _check_settings(self) -> None:
        """Every setting is one of the evaluator, and none says otherwise than an option."""
        if not self.settings_words:
            return
        from deploy.resolve import validate

        given = self._given_settings()
        for name, value, default in (("protocol", self.protocol, "sequential"), ("rules", self.rules, "strict")):
            if value not in (default, given.get(name, value)):
                raise UsageError(f"--{name} {value} and --evaluator.{name} {given[name]}: give one of them")
        validate(_settings_tree(), {"evaluator": given}, "of kontrast evaluate")

    def _given_settings(self) -> dict[str, Any]:
        from deploy.resolve import parse_overrides

        tree = parse_overrides(self.settings_words, _settings_tree())
        if stray := sorted(set(tree) - {"evaluator"}):
            key = next(iter(tree[stray[0]]))
            near = difflib.get_close_matches(stray[0], ["evaluator"], 1)
            hint = f"did you mean --evaluator.{key}?" if near else "kontrast evaluate takes those of the evaluator only"
            raise UsageError(f"unknown setting --{stray[0]}.{key}: {hint}")
        return dict(tree.get("evaluator", {}))

    @property
    def settings(self) -> dict[str, Any]:
        """The evaluator's settings that the options name."""
        given = self._given_settings() if self.settings_words else {}
        return {"protocol": self.protocol, "rules": self.rules, **given}

    @property
    def options(self) -> dict[str, Any]:
        """What the evaluator is asked for beside task, candidate and seed: what differs from its defaults."""
        asked = {"baseline": self.baseline, "profile": self.profile}
        return {name: value for name, value in asked.items() if value not in ("eager", False)}

    @property
    def seed_bytes(self) -> bytes | None:
        """The seed to draw from; None for a fresh secret one."""
        return bytes.fromhex(self.seed) if self.seed else None

    def task(self, reference: str) -> Task:
        """The task of an id or a path."""
        from tasks.suites import load_task

        where = Path(self.kernelbench) if self.kernelbench else None
        return load_task(reference, size=self._size(), kernelbench=where, precision=self._precision())

    def task_from_text(self, text: str, where: str) -> Task:
        """A task from its source."""
        from tasks.reference_source import task_from_source

        return task_from_source(text, where=where, precision=self._precision())

    def devices(self) -> list[str]:
        """One device's name for each evaluator: with plain `cuda` each gets a GPU of its own."""
        if self.device == "cuda" and self.evaluators > 1:
            return [f"cuda:{index}" for index in range(self.evaluators)]
        return [self.device] * self.evaluators

    def reproduce(self, task: str, candidate: str, seed: str) -> str:
        """The command line that evaluates the same inputs again."""
        command = ["kontrast", "evaluate", task, candidate]
        for flag, value, default in (
            ("--device", self.device, "cpu"), ("--protocol", self.protocol, "sequential"),
            ("--rules", self.rules, "strict"), ("--dtype", self.dtype, "fp32"), ("--size", self.size, ""),
            ("--kernelbench", self.kernelbench, ""), ("--shapes", self.shapes, ""),
            ("--against", self.against, ""), ("--baseline", self.baseline, "eager"), ("--seed", seed, ""),
        ):  # fmt: skip
            command += [flag, value] if value != default else []
        return shlex.join([*command, *self.settings_words])

    def deeper(self, task: str, candidate: str, shape: Mapping[str, Any]) -> tuple[str, ...]:
        """The command lines that look deeper into a candidate than a profile; none for one from standard input.

        They run it alone and outside of the sandbox (`deploy.cli.replay`). On a CPU they are `perf`'s, and `ncu` and
        `nsys` for a machine with a CUDA device.
        """
        if candidate == "-":
            return ()
        replay = [sys.executable, "-m", "deploy.cli.replay", task, candidate]
        size = self._size() if task.startswith("procedural:") else ""
        for flag, value, default in (
            ("--dtype", self.dtype, "fp32"), ("--size", size, ""), ("--kernelbench", self.kernelbench, ""),
            ("--shape", json.dumps(shape), "{}"),
        ):  # fmt: skip
            replay += [flag, value] if value != default else []
        where = ["--device", "cuda" if self.device == "cpu" else self.device]
        ncu = ["ncu", "--set", "full", "--profile-from-start", "off", "-f", "-o", "kontrast-ncu", *replay, *where]
        nsys = ["nsys", "profile", "--trace=cuda,nvtx,osrt", "--capture-range=cudaProfilerApi", "-f", "true"]
        nsys += ["-o", "kontrast-nsys", *replay, *where]
        perf = ["perf", "record", "-g", "-o", "kontrast-perf.data", *replay, "--calls", "1000"]
        commands = [[*ncu, "--calls", "1"], nsys]
        return tuple(map(shlex.join, [perf, *commands] if self.device == "cpu" else commands))

    def _size(self) -> Size:
        if self.size:
            return "cpu" if self.size == "cpu" else "gpu"
        return "cpu" if self.device == "cpu" else "gpu"

    def _precision(self) -> Precision:
        return self.dtype  # type: ignore[return-value]  # checked when it was made


@cache
def _settings_tree() -> type[Section]:
    """The part of the configuration that the command takes settings of."""
    from evaluator.config import EvaluatorConfig

    class Settings(Section):
        evaluator: EvaluatorConfig = EvaluatorConfig()

    Settings.model_rebuild(_types_namespace={"EvaluatorConfig": EvaluatorConfig})
    return Settings


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, 1)
        hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(allowed)}"
        raise UsageError(f"{flag} {value} is unknown: {hint}")


def read_candidate(reference: str, task: Task) -> Candidate:
    """The candidate in a file, on standard input (`-`) or among the task's seed kernels (`seed:NAME`).

    Raises UsageError.
    """
    if reference == "-":
        data = sys.stdin.buffer.read(MAX_CANDIDATE_BYTES + 1)
        return Candidate(source=_decoded(data, "standard input"), origin="text", detail="standard input")
    if reference.startswith("seed:"):
        return _seed(reference, task)
    path = Path(reference)
    if os.path.isdir(path):
        raise UsageError(f"{reference} is a folder; give one file of it")
    from tasks.reference_source import read_source

    return Candidate(source=read_source(path), origin="file", detail=reference)


def _seed(reference: str, task: Task) -> Candidate:
    from tasks.procedural import seed_kernels

    seeds = {seed.name: seed for seed in seed_kernels(task)}
    name = reference.removeprefix("seed:")
    if name not in seeds:
        known = f"it has {', '.join(seeds)}" if seeds else "it has none"
        raise UsageError(f"{task.id} has no seed kernel {name!r}: {known}")
    return Candidate(source=seeds[name].source, origin="seed", detail=name)


def _decoded(data: bytes, where: str) -> str:
    if len(data) > MAX_CANDIDATE_BYTES:
        raise UsageError(f"{where} is larger than {MAX_CANDIDATE_BYTES} bytes, too large for a kernel source")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{where} is binary, not UTF-8 text; give Python source")
    return text


def make_judge(device: str, settings: dict[str, Any]) -> AbstractContextManager[Judge]:
    """The real evaluator."""
    from evaluator import Evaluator
    from evaluator.config import EvaluatorConfig

    return _narrated(Evaluator(device, EvaluatorConfig(**settings)))


@contextmanager
def _narrated(evaluator: Evaluator) -> Iterator[Judge]:
    """The evaluator, with lines on standard error while it is waited for."""
    with evaluator, waiting_told(evaluator.activity):
        yield evaluator


@dataclass(frozen=True)
class Work:
    """What the files of a request said when they were read."""

    candidate: Candidate
    tasks: tuple[tuple[dict[str, Any], Task], ...]
    """Shapes and their tasks; one empty shape where none were asked for."""
    against: Candidate | None = None
    references: tuple[str, str] = ("", "")
    """Task and candidate as they were given."""


def read_work(request: Request, task_reference: str, candidate_reference: str) -> Work:
    """Reads and checks everything that is to be evaluated. Raises UsageError."""
    from deploy.cli.shapes import read_shapes

    if candidate_reference == request.against == "-":
        raise UsageError("candidate and --against cannot both come from standard input: give one of them as a file")
    task = request.task(task_reference)
    candidate = read_candidate(candidate_reference, task)
    against = read_candidate(request.against, task) if request.against else None
    shapes = read_shapes(Path(request.shapes), task) if request.shapes else [({}, task)]
    return Work(candidate, tuple(shapes), against, (task_reference, candidate_reference))


def result_of(
    request: Request, work: Work, judge: Judge, told: Callable[[Evaluation], None] = lambda _: None
) -> Result:
    """Evaluates every shape; `told` hears of each evaluation as soon as it is there.

    Raises UsageError for a baseline that does not work here.
    """
    options = request.options if work.against is None else {**request.options, "against": work.against}
    evaluations = []
    for shape, task in work.tasks:
        evaluation = judge.evaluate(task, work.candidate, seed=request.seed_bytes, **options)
        if evaluation.reason == "baseline_failed":
            raise UsageError(evaluation.message)
        update: dict[str, Any] = {"shape": shape}
        if evaluation.profile is not None:
            commands = request.deeper(*work.references, shape)
            update["profile"] = evaluation.profile.model_copy(update={"commands": commands})
        evaluations.append(evaluation.model_copy(update=update))
        told(evaluations[-1])
    return Sweep.of(evaluations) if request.shapes else evaluations[0]


def evaluate_one(
    request: Request, task_reference: str, candidate_reference: str, *, as_json: bool, out: str = "",
    watch: bool = False, make: MakeJudge = make_judge,
) -> int:  # fmt: skip
    """Evaluates one candidate, on one shape or several, and prints the result; returns the exit code.

    With `watch` it does so after each save. Raises UsageError.
    """
    if not task_reference or not candidate_reference:
        raise UsageError("give a task and a candidate, or --batch FILE: see kontrast evaluate --help")
    if out or request.evaluators > 1:
        raise UsageError("--out and --evaluators belong to --batch: leave them out for one candidate")
    if watch:
        from deploy.cli.watch import evaluate_watch

        if as_json:
            raise UsageError("--json prints one object: leave it out with --watch, which prints a line each time")
        if request.profile:
            raise UsageError("--profile prints a table: leave it out with --watch, which prints a line each time")
        return evaluate_watch(request, task_reference, candidate_reference, make=make)
    work = read_work(request, task_reference, candidate_reference)
    with results_stream() as stream:
        with make(request.device, request.settings) as judge:
            result = result_of(request, work, judge, _progress(len(work.tasks)) if request.shapes else lambda _: None)
        again = partial(request.reproduce, task_reference, candidate_reference)
        if as_json:
            stream.write(result.to_json() + "\n")
        elif isinstance(result, Sweep):
            from deploy.cli.panel import print_sweep

            print_sweep(result, stream, again)
        else:
            from deploy.cli.panel import print_panel

            print_panel(result, stream, command=again(str(result.detail.get("seed") or "")))
    return EXIT_CODES[result.outcome]


def _progress(count: int) -> Callable[[Evaluation], None]:
    """Says on standard error how far a sweep is."""
    from deploy.cli.panel import brief

    numbers = iter(range(1, count + 1))

    def told(evaluation: Evaluation) -> None:
        typer.echo(f"{next(numbers)}/{count} {shape_words(evaluation.shape)}: {brief(evaluation)}", err=True)

    return told


def evaluate_controls(
    request: Request, task_reference: str, count: int, *, as_json: bool, stray: str = "", make: MakeJudge = make_judge
) -> int:
    """Measures a reference against itself `count` times and prints the figures; the exit code. Raises UsageError."""
    from evaluator.timing.controls import ENOUGH, health

    if not task_reference or stray or request.evaluators > 1:
        raise UsageError(
            "--control takes a task and nothing else: leave candidate, --batch, --out, --seed and --evaluators out"
        )
    task, found = request.task(task_reference), []
    with results_stream() as stream:
        with make(request.device, request.settings) as judge:
            for number in range(1, count + 1):
                control = judge.control(task)
                found.append(control)
                if not as_json:
                    stream.write(f"{number}: {control.reason or 'accepted'}. {control.message}\n")
                    stream.flush()
        figures = health(found)
        if as_json:
            stream.write(stable_json(asdict(figures)) + "\n")
        elif not figures.measured:
            stream.write(f"None of {figures.failed} was measured, so nothing is known of the evaluator.\n")
        else:
            stream.write(
                f"{figures.measured} measured, {figures.failed} failed, {figures.coverage:.0%} of intervals cover 1, "
                f"bias {math.expm1(figures.bias_log):+.2%}, half-width {math.expm1(figures.half_width_log):.1%}\n"
            )
            few = "" if figures.measured >= ENOUGH else f"A judgement needs {ENOUGH} of them."
            verdict = f"{figures.alarm}." if figures.alarm else few
            stream.write(f"{verdict}\n" if verdict else "")
    if not figures.measured:
        return EXIT_CODES["unscored"]
    return EXIT_CODES["rejected"] if figures.alarm else EXIT_CODES["accepted"]


def evaluate_batch(request: Request, batch: str, out: str, *, stray: str = "", make: MakeJudge = make_judge) -> int:
    """Evaluates a file of lines; returns the exit code. Raises UsageError before the first evaluation."""
    from deploy.cli.batch import read_lines, run_lines

    if stray:
        raise UsageError(f"unexpected argument {stray}: with --batch, tasks and candidates come from its lines")
    if request.seed:
        raise UsageError("--seed reproduces one evaluation: leave it out with --batch")
    for flag, value in (("--shapes", request.shapes), ("--against", request.against), ("--profile", request.profile)):
        if value:
            raise UsageError(f"{flag} belongs to one candidate: leave it out with --batch")
    lines = read_lines(request, Path(batch))
    with _output(out) as stream:
        return run_lines(request, lines, stream, make=make)


@contextmanager
def _output(out: str) -> Iterator[IO[str]]:
    with ExitStack() as stack:
        if not out:
            yield stack.enter_context(results_stream())
            return
        try:
            file = stack.enter_context(open(out, "w", encoding="utf-8"))
        except OSError as error:
            raise UsageError(
                f"cannot write {out}: {error.strerror}; give --out a file in an existing folder"
            ) from error
        yield file


@contextmanager
def results_stream() -> Iterator[IO[str]]:
    """Standard output for results alone: meanwhile descriptor 1 is standard error, for children and libraries too."""
    sys.stdout.flush()
    own = os.dup(1)
    before = sys.stdout
    try:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        with open(own, "w", encoding="utf-8", closefd=False) as stream:
            yield stream
    finally:
        sys.stdout = before
        os.dup2(own, 1)
        os.close(own)
