"""One evaluation: screen, compile, load, check, probe, time, confirm; then the verdict.

Invariants: facts first, the verdict last and only from facts; the first proven fault ends the evaluation; the worker is
gone when `run` returns; what goes wrong while a worker lives is the candidate's doing unless it goes wrong without it.
"""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from evaluator import checking, loading, measuring
from evaluator.bench import Bench, Ended
from evaluator.compile import BuildDesk
from evaluator.judgement import Rules, first_fault, judge
from evaluator.judgement.defences import ALL_DEFENCES
from evaluator.judgement.facts import CompileFacts, Infrastructure
from evaluator.observed import Observed
from evaluator.timing.clock import slots_for
from evaluator.timing.turns import Arm, ArmFault
from evaluator.worker.process import ProcessLost
from tasks.records import Candidate, Evaluation, Task
from tasks.records.evaluation import Step, UnscoredReason

if TYPE_CHECKING:
    from evaluator.session import Evaluator


class ReferenceFailed(RuntimeError):
    """The reference cannot be run; the text says why."""


class Gate:
    """Ends an evaluation as soon as a fault is proven."""

    def __init__(self, observed: Observed, rules: Rules) -> None:
        self._observed = observed
        self._rules = rules
        self._seen = -1

    def pass_or_end(self) -> None:
        """Raises Ended when the facts so far already reject the candidate."""
        if self._observed.version != self._seen:
            self._seen = self._observed.version
            if first_fault(self._observed.facts(), self._rules) is not None:
                raise Ended


class Flow:
    """One evaluation of one candidate."""

    def __init__(
        self, evaluator: Evaluator, task: Task, candidate: Candidate, *, confirm: bool, seed: bytes | None = None
    ) -> None:  # fmt: skip
        self._evaluator = evaluator
        self._config = evaluator.config
        self._task = task
        self._candidate = candidate
        self._confirm = confirm
        self._rules = Rules.preset(evaluator.config.rules, **evaluator.config.rule)
        self._observed = Observed()
        self._gate = Gate(self._observed, self._rules)
        self._seconds: dict[str, float] = {}
        self._layers: list[str] = []
        self._worker: Arm | None = None
        self._desk = BuildDesk(evaluator.compile_pool)
        self._seed = secrets.token_bytes(16) if seed is None else seed

    def run(self) -> Evaluation:
        """Evaluates; never raises for what the candidate does."""
        try:
            self._steps()
        except Ended:
            pass
        except ReferenceFailed as error:
            self._blame_reference(str(error))
        except loading.SandboxUnavailable as error:
            self._give_up("sandbox_unavailable", str(error))
        except ProcessLost as error:
            self._blame_processes(str(error))
        finally:
            if self._worker is not None:
                self._worker.child.kill()
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
        evaluator, observed, config = self._evaluator, self._observed, self._config
        with self._step("screen"):
            reference = evaluator.reference(self._task)
        observed.growth = observed.growth.model_copy(update={"bytes_per_call": reference.opened["bytes_per_call"]})
        slots = slots_for(reference.opened["bytes_per_call"], reference.opened["leaves"], loading.free_bytes(evaluator.device))
        if not slots:
            self._give_up("too_large", f"two calls need {6 * reference.opened['bytes_per_call'] >> 20} MiB of free memory")
            raise Ended
        with self._step("load"):
            reference.ask({"op": "forget"})
            self._worker, self._layers = loading.spawn(evaluator, self._desk)
            ends_at_s = time.monotonic() + config.deadlines.candidate_s
            rng = random.Random(self._seed)
            bench = Bench(reference, self._worker, observed, rng, ends_at_s, config.deadlines.call_s)
            bench.each = self._rules.output_lifetime == "next_call"
            source = evaluator.text_descriptor(self._candidate.source)
            try:
                loading.load(bench, observed, source, config)
            finally:
                os.close(source)
            if observed.parameters == "loaded":
                bench.load_parameters(bench.secret() if self._rules.weights == "loaded" else None)
            self._seconds["warm"] = loading.warm(bench, config)
            self._desk.open = False
            if observed.parameters == "loaded":
                bench.load_parameters(bench.secret() if self._rules.weights == "loaded" else None)
        with self._step("check", bench):
            checking.check(bench, self._gate, config.check_draws)
        with self._step("probe", bench):
            checking.probe(bench, self._gate)
        with self._step("time", bench), evaluator.lock.held(config.lock_timeout_s) as waited_s:
            bench.ends_at_s += waited_s
            result = measuring.measure(bench, self._gate, evaluator.device, config, slots)
            observed.measurement = result.measurement
            observed.span_limited, observed.unstable = result.span_limited, result.unstable
            observed.news()
            self._gate.pass_or_end()
        if self._confirm or result.measurement.speedup > config.timing.confirm_above:
            with self._step("confirm", bench), evaluator.lock.held(config.lock_timeout_s) as waited_s:
                bench.ends_at_s += waited_s + config.timing.cap_s
                measuring.confirm(bench, self._gate, evaluator.device, config, slots)

    @contextmanager
    def _step(self, name: Step, bench: Bench | None = None) -> Iterator[None]:
        self._observed.step = name
        if bench is not None:
            bench.step = name
        begin = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begin

    def _give_up(self, reason: UnscoredReason, detail: str) -> None:
        self._observed.infrastructure = Infrastructure(reason=reason, step=self._observed.step, detail=detail)

    def _blame_reference(self, text: str) -> None:
        """A reference that fails beside a worker and passes without it was harmed by that worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.child.kill()
        self._evaluator.drop_reference()
        try:
            self._evaluator.reference(self._task)
        except (ReferenceFailed, ProcessLost, ArmFault):
            self._give_up("reference_failed", text)
            return
        if worker is None:
            self._give_up("reference_failed", text)
        else:
            self._observed.end("reference_failed_beside", self._observed.step, text)

    def _blame_processes(self, text: str) -> None:
        """A zygote that died while its worker had the turn was killed by that worker."""
        had_turn = self._worker is not None and not self._evaluator.zygote_alive()
        self._evaluator.close_processes()
        if had_turn:
            self._observed.end("zygote_died", self._observed.step, text)
        else:
            self._give_up("evaluator_lost", text)

    def _evaluation(self) -> Evaluation:
        observed, task = self._observed, self._task
        facts = observed.facts()
        verdict = judge(facts, self._rules)
        detail = {**verdict.detail, "seed": self._seed.hex()}
        return Evaluation(
            outcome=verdict.outcome, reason=verdict.reason, step=verdict.step, message=verdict.message,
            labels=verdict.labels, measurement=verdict.measurement, detail=detail,
            facts=facts.model_dump(mode="json", exclude_defaults=True), task_id=task.id, task_hash=task.content_hash,
            candidate_hash=self._candidate.content_hash, device_type=self._evaluator.device.type,
            precision=task.precision, protocol=self._config.protocol, rules=self._config.rules, defences=ALL_DEFENCES,
            isolation=tuple(self._layers), seconds_by_step=self._seconds,
            seed_commitment=hashlib.sha256(self._seed).hexdigest(),
        )  # fmt: skip
