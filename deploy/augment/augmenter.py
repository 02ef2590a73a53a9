"""Asks the teachers and judges what they write, until every pair of teacher and task is finished.

Invariants: an answer is in the journal before it is judged, a verdict before it counts; the attempts of a pair come one
after the other, so that none is asked for after the last success; equal candidates of a task are evaluated once; a
teacher that is lost holds up no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.augment.journal import Answered, Entry, Judged, Refused, Skipped, Verdict
from deploy.augment.state import AugmentState, Pair
from deploy.augment.teachers import Teacher, TeacherLost, TeacherRefused
from deploy.config import AugmentConfig
from deploy.graph.handles import WaitedTooLong, WorkerLost
from deploy.graph.recorder import REFUSING, UNREADABLE
from rollout import parse_completion
from tasks.records import Candidate, Demonstration, Evaluation, Task

_log = logging.getLogger(__name__)
EVALUATIONS = 2
"""How often a candidate is evaluated before it is unscored for good."""
IMPORTS_AT_ONCE = 16

Evaluate = Callable[[Task, Candidate], Awaitable[Evaluation]]


@dataclass(frozen=True)
class Imported:
    """A kernel of an existing set."""

    source: str
    """Name of the set, as `import:<name>`."""
    task: Task
    candidate: Candidate


class Augmenter:
    """One augmentation, from wherever its journal left it to its end."""

    def __init__(
        self, tasks: Sequence[Task], teachers: Mapping[str, Teacher], evaluate: Evaluate, config: AugmentConfig,
        state: AugmentState, note: Callable[[Entry], None], *, device_type: str,
    ) -> None:  # fmt: skip
        """`note` stores an entry durably before it returns."""
        self._tasks, self._teachers, self._evaluate, self._config = tasks, teachers, evaluate, config
        self.state, self._note, self._device_type = state, note, device_type
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self.lost: dict[str, str] = {}
        """Teachers that could not be asked any more, with the reason."""

    async def run(self, imports: Iterable[Imported] = ()) -> None:
        """Evaluates what is to be imported, then works through all pairs of teacher and task."""
        await self._import(imports)
        await together(self._teach(name, teacher) for name, teacher in self._teachers.items())

    @property
    def spent(self) -> bool:
        """Whether the limit of the costs is reached."""
        return 0 < self._config.max_cost <= self.state.cost

    def left(self) -> int:
        """Pairs of teacher and task that are not finished."""
        return sum(
            not self._finished(self.state.pair(name, task.content_hash), task)
            for name in self._teachers
            for task in self._tasks
        )

    def _finished(self, pair: Pair, task: Task) -> bool:
        asked = pair.finished(attempts=self._config.attempts, successes=self._config.successes)
        return task.content_hash in self.state.skipped or (asked and not pair.unjudged)

    def _store(self, entry: Entry) -> None:
        self._note(entry)
        self.state.apply(entry)

    async def _import(self, imports: Iterable[Imported]) -> None:
        slots = asyncio.Semaphore(IMPORTS_AT_ONCE)

        async def one(kernel: Imported) -> None:
            async with slots:
                pair = self.state.pair(kernel.source, kernel.task.content_hash)
                done = {judged.candidate_hash for judged in pair.verdicts.values()}
                if kernel.candidate.content_hash not in done and kernel.task.content_hash not in self.state.skipped:
                    await self._judge(kernel.source, kernel.task, None, kernel.candidate, "", "")

        await together(one(kernel) for kernel in imports)

    async def _teach(self, name: str, teacher: Teacher) -> None:
        slots = asyncio.Semaphore(teacher.tasks_at_once)

        async def one(task: Task) -> None:
            async with slots:
                await self._work(name, teacher, task)

        await together(one(task) for task in self._tasks)

    async def _work(self, name: str, teacher: Teacher, task: Task) -> None:
        pair = self.state.pair(name, task.content_hash)
        for answered in pair.unjudged:
            await self._judge_answer(task, answered)
        while not self._finished(pair, task) and name not in self.lost and not self.spent:
            index = len(pair.answers)
            try:
                answer = await teacher.ask(task, index)
            except TeacherRefused as error:
                self._store(
                    Refused(teacher=name, task_id=task.id, task_hash=task.content_hash, message=str(error))
                )  # fmt: skip
                return
            except TeacherLost as error:
                if name not in self.lost:
                    self.lost[name] = str(error)
                    _log.warning("teacher %s is not asked any more: %s", name, error)
                return
            answered = Answered(
                teacher=name, task_id=task.id, task_hash=task.content_hash, index=index, text=answer.text,
                finish_reason=answer.finish_reason, prompt_tokens=answer.prompt_tokens, new_tokens=answer.new_tokens,
                cost=answer.cost, seconds=answer.seconds,
            )  # fmt: skip
            self._store(answered)
            await self._judge_answer(task, answered)

    async def _judge_answer(self, task: Task, answered: Answered) -> None:
        parsed = parse_completion(answered.text, cut=answered.finish_reason == "length")
        if parsed.source is None:
            problem = parsed.error or "no_code"
            self._store(
                Judged(
                    teacher=answered.teacher, task_id=task.id, task_hash=task.content_hash, index=answered.index,
                    verdict="unreadable", reason=problem, message=UNREADABLE[problem],
                )
            )  # fmt: skip
            return
        detail = f"{answered.teacher}/{task.content_hash[:12]}/{answered.index}"
        candidate = Candidate(source=parsed.source, origin="sample", detail=detail)
        await self._judge(answered.teacher, task, answered.index, candidate, parsed.analysis, parsed.design)

    async def _judge(
        self, teacher: str, task: Task, index: int | None, candidate: Candidate, analysis: str, design: str
    ) -> None:
        """Judges a candidate and stores the verdict; `index` None takes the next one of an import."""
        key = task.content_hash, candidate.content_hash
        async with self._locks.setdefault(key, asyncio.Lock()):
            known, evaluation = self.state.known.get(key), None
            if known is None:
                evaluation = await self._evaluation(task, candidate)
                if evaluation.reason in REFUSING:
                    self._store(
                        Skipped(
                            task_id=task.id, task_hash=task.content_hash, reason=str(evaluation.reason),
                            message=evaluation.message,
                        )
                    )  # fmt: skip
                    return
            number = len(self.state.pair(teacher, task.content_hash).verdicts) if index is None else index
            verdict, reason, message, speedup = self._verdict(known, evaluation)
            demonstration = None
            if verdict == "accepted" and evaluation is not None and evaluation.measurement is not None:
                demonstration = Demonstration(
                    task=task, candidate=candidate, analysis=analysis, design=design, teacher=teacher,
                    device_type=self._device_type, measurement=evaluation.measurement,
                )  # fmt: skip
            self._store(
                Judged(
                    teacher=teacher, task_id=task.id, task_hash=task.content_hash, index=number, verdict=verdict,
                    reason=reason, message=message, candidate_hash=candidate.content_hash, speedup=speedup,
                    demonstration=demonstration,
                )
            )  # fmt: skip

    def _verdict(self, known: Judged | None, evaluation: Evaluation | None) -> tuple[Verdict, str, str, float | None]:
        """Verdict, reason, message, speedup: of an equal candidate judged before, else of the evaluation."""
        if known is not None:
            verdict: Verdict = "duplicate" if known.verdict in ("accepted", "duplicate") else known.verdict
            return verdict, known.reason, known.message, known.speedup
        if evaluation is None:
            raise ValueError("a candidate without an earlier verdict has an evaluation")
        measurement = evaluation.measurement
        if evaluation.outcome != "accepted" or measurement is None:
            return evaluation.outcome, evaluation.reason or "", evaluation.message, None
        slow = measurement.ci_low <= self._config.above
        return "slow" if slow else "accepted", "", evaluation.message, measurement.speedup

    async def _evaluation(self, task: Task, candidate: Candidate) -> Evaluation:
        evaluation: Evaluation | None = None
        lost = ""
        for _ in range(EVALUATIONS):
            try:
                evaluation = await self._evaluate(task, candidate)
            except (WorkerLost, WaitedTooLong) as error:
                _log.warning("%s: %s", candidate.detail, error)
                lost = str(error)
                continue
            if evaluation.outcome != "unscored" or evaluation.reason in REFUSING:
                break
        return evaluation or Evaluation(
            outcome="unscored", reason="evaluator_lost", step="load", message=lost, task_id=task.id,
            task_hash=task.content_hash, candidate_hash=candidate.content_hash, device_type=self._device_type,
            precision=task.precision,
        )  # fmt: skip


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs all; the first failure cancels the others and is raised as it is."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
