"""One evaluation: screen, compile, load, warm, check, probe, time, confirm; then the verdict.

Invariants: facts first, the verdict last and only from facts; the first proven fault ends the evaluation; both workers
are gone when `run` returns; what goes wrong while a candidate lives is its doing unless it goes wrong without it.
"""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from evaluator import checking, loading, measuring, profiling
from evaluator.bench import Bench
from evaluator.compile import BuildDesk
from evaluator.device import DeviceBusy
from evaluator.judgement import Rules, first_fault, judge
from evaluator.judgement.defences import ALL_DEFENCES
from evaluator.judgement.facts import CompileFacts, Infrastructure
from evaluator.observed import Observed
from evaluator.screen import screen
from evaluator.sides import Ended, ReferenceFailed, Side, Which
from evaluator.worker.process import ProcessLost
from tasks.records import Candidate, Evaluation, Task
from tasks.records.evaluation import Step, UnscoredReason
from tasks.records.profile import Profile

if TYPE_CHECKING:
    from evaluator.config import EvaluatorConfig
    from evaluator.duel import Duel
    from evaluator.session import Evaluator, Seat, WarmReference

_FORWARD_ONLY = (
    "The task's inputs require gradients: the forward pass alone is judged, the backward pass is not served."
)


_WORDS = {
    "screen": "a look at the candidate's source",
    "admit": "the reference to be admitted (its error budget in float64)",
    "load": "the workers to load",
    "warm": "the first calls",
    "check": "the check on fresh inputs",
    "probe": "the probe for work that goes on",
    "time": "the paired timing",
    "confirm": "the second timing, on fresh inputs",
    "profile": "the profile",
    "other": "the other candidate to be checked",
}
"""What is waited for in each step, and in what is timed like one."""


class Gate:
    """Ends an evaluation as soon as a fault is proven."""

    def __init__(self, observed: Observed, rules: Rules, defences: Sequence[str]) -> None:
        self._observed = observed
        self._rules = rules
        self._defences = defences
        self._seen = -1

    def closed(self) -> bool:
        """Whether the facts so far already reject the candidate."""
        return first_fault(self._observed.facts(), self._rules, self._defences) is not None

    def pass_or_end(self) -> None:
        """Raises Ended when the facts so far already reject the candidate."""
        if self._observed.version != self._seen:
            self._seen = self._observed.version
            if self.closed():
                raise Ended


class Flow:
    """One evaluation of one candidate."""

    def __init__(
        self, evaluator: Evaluator, task: Task, candidate: Candidate, *, config: EvaluatorConfig, confirm: bool,
        seed: bytes | None = None, seat: Seat = 0, seats: int = 1, profiled: bool = False,
    ) -> None:  # fmt: skip
        self._evaluator = evaluator
        self._seat: Seat = seat
        self._seats = seats
        self._profiled = profiled
        self._profile: Profile | None = None
        self._notes: tuple[str, ...] = ()
        self._config = config
        self._task = task
        self._candidate = candidate
        self._confirm = confirm
        self._rules = Rules.preset(config.rules, **config.rule)
        self._activity = evaluator.activity
        self._observed = Observed(self._activity)
        self._defences = tuple(name for name in ALL_DEFENCES if name not in evaluator.config.defences_off)
        self._gate = Gate(self._observed, self._rules, self._defences)
        self._seconds: dict[str, float] = {}
        self._sides: list[Side] = []
        self.waited_s = 0.0
        self._desk = self._new_desk()
        self._seed = secrets.token_bytes(16) if seed is None else seed

    def run(self) -> Evaluation:
        """Evaluates; never raises for what the candidate does."""
        try:
            self._guarded(self._steps)
        finally:
            self._end_sides()
        return self._concluded()

    def _guarded(self, steps: Callable[[], None]) -> bool:
        """Runs steps; whether they came to their end. What ended them is noted."""
        try:
            steps()
        except Ended:
            if self._observed.ending is not None and self._zygote_died():
                self._observed.ending = None  # the worker died of it, in its own turn
                self._observed.end("zygote_died", "the process that forks workers is gone")
        except ReferenceFailed as error:
            self._blame_reference(str(error))
        except loading.SandboxUnavailable as error:
            self._give_up("sandbox_unavailable", str(error))
        except (DeviceBusy, ProcessLost) as error:
            self._give_up("evaluator_lost", str(error))
        else:
            return True
        return False

    def _concluded(self) -> Evaluation:
        """The verdict, once both sides are gone."""
        self._check_device()
        self._note_builds()
        return self._evaluation()

    def _note_builds(self) -> None:
        """What the pool saw of the candidate's builds; its word stands above the worker's."""
        observed, failure = self._observed, self._desk.failure
        update: dict[str, object] = {"routes": self._desk.routes + observed.compile.routes}
        if failure is not None and self._desk.fault is not None:
            observed.compile = CompileFacts()
            self._give_up(self._desk.fault, failure.message)
        elif failure is not None and observed.compile.failed:
            update["error"] = failure.text or failure.message
        observed.compile = observed.compile.model_copy(update=update)
        if self._desk.results:
            self._seconds["compile"] = sum(result.seconds for result in self._desk.results)

    def _steps(self) -> None:
        bench, slots = self._prepare()
        self._time(bench, slots)
        self._look_closer(bench)

    def _prepare(self) -> tuple[Bench, int]:
        """Everything before the timing; the bench, and how many calls its arenas hold."""
        with self._step("screen"):
            self._observed.screen = screen(self._candidate, self._task)
            self._observed.news()
            self._gate.pass_or_end()
        with self._timed("admit"):
            server = self._server()
        opened = server.opened
        self._notes = (_FORWARD_ONLY,) if opened["gradients"] else ()
        self._observed.bytes_per_call(opened["bytes_per_call"])
        seats = self._seats * (self._config.candidates_at_once if self._evaluator.device.runtime else 1)
        slots, free_bytes = loading.slots(opened, self._evaluator.device, seats)
        if not slots:
            needed = 2 * opened["bytes_per_call"] >> 20
            free = free_bytes >> 20
            self._give_up("too_large", f"two calls take {needed} MiB in each of several copies, of {free} MiB free")
            raise Ended
        with self._step("load"):
            bench = self._bench(server)
            loading.open_devices(bench)
            self._load(bench)
        with self._step("warm"):
            loading.warm(bench, self._config)
            self._desk.open = False
        self._gate.pass_or_end()
        with self._step("check"):
            checking.check(bench, self._gate, self._config.check_draws)
        with self._step("probe"):
            checking.probe(bench, self._gate)
        return bench, slots

    def _time(self, bench: Bench | Duel, slots: int) -> None:
        """Times, and confirms where that is due."""
        timing = self._config.timing
        bench.extend(timing.paper_window_s if self._config.protocol == "paper" else timing.cap_s)
        with self._step("time"), self._exclusive(bench):
            measuring.measure(bench, self._gate, self._evaluator.device, self._config, slots)
        if self._confirm or self._observed.measured_speedup() > timing.confirm_above:
            with self._step("confirm"), self._exclusive(bench):
                bench.extend(2 * timing.cap_s)
                measuring.confirm(bench, self._gate, self._evaluator.device, self._config, slots)

    def _look_closer(self, bench: Bench) -> None:
        """The profile of a candidate that is accepted by all that was seen; no fact is added by it."""
        verdict = judge(self._observed.facts(), self._rules, self._defences)
        if self._profiled and verdict.measurement is not None and verdict.outcome == "accepted":
            with self._timed("profile"):
                device = self._evaluator.device
                self._profile = profiling.profile(bench, device, verdict.measurement, self._task.precision)

    def _server(self) -> WarmReference:
        """The warm server, free of the last candidate; a new one where it died since."""
        server = self._evaluator.reference(self._task, self._seat)
        try:
            server.ask({"op": "forget"})
        except ReferenceFailed:
            self._evaluator.drop_reference(self._seat)
            server = self._evaluator.reference(self._task, self._seat)
            server.ask({"op": "forget"})
        return server

    def _new_desk(self) -> BuildDesk:
        return BuildDesk(self._evaluator.compile_pool, self._activity)

    def _bench(self, server: WarmReference) -> Bench:
        """Forks both sides and puts the server between them."""
        names: tuple[Which, Which] = ("reference", "candidate")
        for which in names:
            desk = self._desk if which == "candidate" else self._new_desk()
            arm, layers = loading.spawn(self._evaluator, desk)
            self._sides.append(Side(which, arm, layers, self._observed, self._config.deadlines.call_s))
        self._sides[1].ends_at_s = time.monotonic() + self._config.deadlines.candidate_s
        bench = Bench(server, (self._sides[0], self._sides[1]), self._observed, random.Random(self._seed))
        bench.random_parameters = self._rules.weights == "loaded"
        bench.on = frozenset(self._defences)
        bench.each = self._rules.output_lifetime == "next_call"
        bench.gauges = self._evaluator.gauges()
        bench.history = self._evaluator.history
        return bench

    def _load(self, bench: Bench) -> None:
        sources = {
            "reference": self._evaluator.text_descriptor(self._task.source),
            "candidate": self._evaluator.text_descriptor(self._candidate.source),
        }
        try:
            loading.load(bench, sources, self._config)
        finally:
            for number in sources.values():
                os.close(number)
        if self._observed.parameters == "loaded":
            bench.load_parameters(bench.secret() if bench.random_parameters else None)

    @contextmanager
    def _exclusive(self, bench: Bench | Duel) -> Iterator[None]:
        """Holds the device and, where permitted, puts arms and server before everybody else on their cores."""
        children, timeout_s = bench.children(), self._config.lock_timeout_s
        with ExitStack() as stack:
            with self._activity.doing("the device to be free", timeout_s):
                waited_s = stack.enter_context(self._evaluator.lock.held(timeout_s))
            bench.extend(waited_s)
            self.waited_s += waited_s
            for child in children:
                child.prefer(True)
            try:
                yield
            finally:
                for child in children:
                    child.prefer(False)

    @contextmanager
    def _step(self, name: Step) -> Iterator[None]:
        self._observed.step = name
        with self._timed(name):
            yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Counts the step's seconds, the wait for the device not among them."""
        begin, waited_s = time.monotonic(), self.waited_s
        try:
            with self._activity.doing(_WORDS[name]):
                yield
        finally:
            spent = time.monotonic() - begin - (self.waited_s - waited_s)
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def _end_sides(self) -> None:
        for side in self._sides:
            side.arm.child.kill()

    def _give_up(self, reason: UnscoredReason, detail: str) -> None:
        self._observed.infrastructure = Infrastructure(reason=reason, step=self._observed.step, detail=detail)

    def _zygote_died(self) -> bool:
        """Whether the zygote is gone; workers die of it a moment before that can be seen."""
        for _ in range(5):
            if not self._evaluator.zygote_alive():
                return True
            time.sleep(0.005)
        return False

    def _blame_reference(self, text: str) -> None:
        """A reference that fails beside a candidate and passes without it was harmed by that candidate."""
        beside = len(self._sides) > 1
        self._end_sides()
        if self._zygote_died():  # the candidate was stopped meanwhile
            self._give_up("evaluator_lost", "the process that forks workers is gone")
            return
        self._evaluator.drop_reference()
        try:
            loading.try_reference(self._evaluator, self._task)
        except (Ended, ReferenceFailed, ProcessLost, loading.SandboxUnavailable):
            self._give_up("reference_failed" if self._well() else "device_fault", text)
            return
        if beside:
            self._observed.end("reference_failed_beside", text)
        else:
            self._give_up("reference_failed", text)

    def _check_device(self) -> None:
        """After a worker's crash or timeout: a device that fails with the worker gone is at fault itself."""
        ending = self._observed.ending
        if not self._evaluator.device.runtime or ending is None or ending.kind == "contract":
            return
        if not self._well():
            self._give_up("device_fault", f"the device failed its health probe after: {ending.detail}")

    def _well(self) -> bool:
        """Whether the device computes: asked of the server, and where that fails of a new one."""
        if not self._evaluator.device.runtime:
            return True
        for _ in range(2):
            try:
                if self._evaluator.reference(self._task).ask({"op": "health"}).answer["well"]:
                    return True
            except (ReferenceFailed, ProcessLost):
                self._evaluator.drop_reference()
        return False

    def _evaluation(self) -> Evaluation:
        observed, task = self._observed, self._task
        facts = observed.facts()
        verdict = judge(facts, self._rules, self._defences)
        layers = self._sides[1].layers if len(self._sides) > 1 else ()
        return Evaluation(
            outcome=verdict.outcome, reason=verdict.reason, step=verdict.step, message=verdict.message,
            labels=verdict.labels, measurement=verdict.measurement, detail={**verdict.detail, "seed": self._seed.hex()},
            facts=facts.model_dump(mode="json", exclude_defaults=True), task_id=task.id, task_hash=task.content_hash,
            candidate_hash=self._candidate.content_hash, device_type=self._evaluator.device.type,
            precision=task.precision, protocol=self._config.protocol, rules=self._config.rules, defences=self._defences,
            isolation=layers, seconds_by_step={name: round(value, 4) for name, value in self._seconds.items()},
            seed_commitment=hashlib.sha256(self._seed).hexdigest(), turns=observed.turns.columns,
            profile=self._profile, notes=self._notes,
        )  # fmt: skip
