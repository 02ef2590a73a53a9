"""What stands of a candidate's evaluation in a run: measured or known, confirmed, reviewed; a proven cheat is filed.

Invariants: what is on file is never measured again; a score that pays is measured twice where the policy of
confirmation asks for it; a failure of ours costs a candidate nothing but the label that says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from deploy.graph.evaluators import evaluator_of
from deploy.graph.handles import WorkerLost
from deploy.graph.reviewing import hacking_case, is_cheat
from deploy.graph.tools import Evaluate, Rules
from evaluator.judgement.confirm import conclude, is_jump, needs_confirmation
from evaluator.review import Ask, KnownCheat, review, reviewed
from exemplar_store import CacheKey, ExemplarStore
from exemplar_store.hacking_cases import HackingCases
from tasks.records import Candidate, Evaluation, Measurement, Task

T = TypeVar("T")
_log = logging.getLogger(__name__)
CONFIRMATION_ATTEMPTS = 2


class StoreThread:
    """Runs work on the store in one thread: a stream is for one, and the store's answers must not hold up others."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    async def __call__(self, work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments, **named))


class Verdicts:
    """See the module's text. `ask` is the reviewing model, None where nobody is asked."""

    def __init__(
        self, run_id: str, store: ExemplarStore, in_store: StoreThread, evaluate: Evaluate, ask: Ask | None,
        rules: Rules,
    ) -> None:  # fmt: skip
        self._run_id = run_id
        self._store = store
        self._in_store = in_store
        self._evaluate = evaluate
        self._ask = ask
        self._rules = rules
        self._cheats = HackingCases(store)
        self._cheats.seed()

    async def known(self, task: Task, candidate: Candidate, device_type: str) -> Evaluation | None:
        """What is on file."""
        return await self._in_store(self._store.cached, self._key(task, candidate, device_type))

    async def of(self, task: Task, candidate: Candidate, device_type: str, *, settle: bool = False) -> Evaluation:
        """From the measurement cache, else measured and, with `settle`, confirmed and reviewed before it is cached."""
        known = await self.known(task, candidate, device_type)
        if known is not None:
            return known
        evaluation = await self._evaluate(task, candidate, device_type, self._rules.protocol)
        if settle:
            evaluation = await self._settled(task, candidate, evaluation)
        key = self._key(task, candidate, device_type)
        if evaluation.outcome != "unscored" and CacheKey.of(evaluation) == key:
            await self._in_store(self._store.cache, key, evaluation, candidate)
        return evaluation

    async def in_full(self, task: Task, candidate: Candidate, device_type: str) -> Evaluation:
        """An accepted candidate measured again by the full protocol.

        The figures are those of the full protocol where it agrees with what is on file.
        """
        first = await self.known(task, candidate, device_type)
        again = await self._evaluate(task, candidate, device_type, "sequential", first)
        if first is None or first.outcome != "accepted" or again.outcome != "accepted":
            return again
        concluded = conclude(first, again, other_device=evaluator_of(again) != evaluator_of(first))
        agreed = concluded.measurement is not None and concluded.measurement.confirmed
        return again if agreed else concluded

    def _key(self, task: Task, candidate: Candidate, device_type: str) -> CacheKey:
        return CacheKey(
            candidate.content_hash, task.content_hash, device_type, task.precision, self._rules.protocol,
            self._rules.rules,
        )  # fmt: skip

    async def _settled(self, task: Task, candidate: Candidate, evaluation: Evaluation) -> Evaluation:
        """What stands of a sample's evaluation after confirmation and review; a cheat becomes a hacking case."""
        if evaluation.outcome == "accepted":
            best = await self._best(task, evaluation.device_type)
            evaluation = await self._confirmed(task, candidate, evaluation, best)
            evaluation = await self._reviewed(task, candidate, evaluation, best)
        if is_cheat(evaluation):
            await asyncio.to_thread(self._learn, task, candidate, evaluation)
        return evaluation

    def _learn(self, task: Task, candidate: Candidate, evaluation: Evaluation) -> None:
        case = hacking_case(task, candidate, evaluation, self._cheats.all(), self._run_id)
        if self._cheats.learn(case):
            _log.info("%s is filed as a hacking case of the family %s", candidate.detail, case.family)

    async def _reviewed(
        self, task: Task, candidate: Candidate, evaluation: Evaluation, best: float | None
    ) -> Evaluation:
        """With the reviewing model's verdict, where an accepted one is a large jump."""
        rules, measurement = self._rules.review, evaluation.measurement
        if self._ask is None or evaluation.outcome != "accepted" or measurement is None:
            return evaluation
        if not is_jump(score_of(measurement), best, above=rules.above, jump=rules.jump):
            return evaluation
        found = await review(
            task, candidate, evaluation, ask=self._ask, similar=self._similar, best=best,
            max_chars=rules.max_prompt_chars, timeout_s=rules.timeout_s,
        )  # fmt: skip
        if found.failure:
            _log.warning("%s goes on unreviewed: %s", candidate.detail, found.failure)
        return reviewed(evaluation, found, binding=rules.mode == "binding")

    async def _similar(self, source: str) -> list[KnownCheat]:
        found = await asyncio.to_thread(self._cheats.similar, source)
        return [KnownCheat(case.family, case.code, case.explanation, near) for case, near in found]

    async def _confirmed(self, task: Task, candidate: Candidate, first: Evaluation, best: float | None) -> Evaluation:
        """What stands of an accepted evaluation, measured again where the policy asks for it."""
        measurement = first.measurement
        if measurement is None:
            raise ValueError(f"{candidate.detail} is accepted without a measurement")
        if not needs_confirmation(
            score_of(measurement), best, above=self._rules.confirm_above, confirmed=measurement.confirmed,
            elsewhere=self._rules.evaluators.get(first.device_type, 1) > 1,
        ):  # fmt: skip
            return first
        again: Evaluation | None = None
        for _ in range(CONFIRMATION_ATTEMPTS):  # a crowded machine can be the cause
            try:
                again = await self._evaluate(task, candidate, first.device_type, self._rules.protocol, first)
            except WorkerLost as error:
                _log.warning("%s is not confirmed yet: %s", candidate.detail, error)
                continue
            if again.outcome != "unscored":
                break
        return conclude(first, again, other_device=again is not None and evaluator_of(again) != evaluator_of(first))

    async def _best(self, task: Task, device_type: str) -> float | None:
        """The best score on file for a task; None without any."""
        best = await self._in_store(
            self._store.best, task.content_hash, device_type, precision=task.precision, protocol=self._rules.protocol
        )
        return None if best is None else best.speedup


def score_of(measurement: Measurement) -> float:
    """What an exemplar is filed and a sample is paid by."""
    return measurement.ci_low if measurement.protocol == "reward" else measurement.speedup
