"""The reviewing model of a run: an actor around one engine, and the cases that confirmed cheats become.

Invariants: the reviewer sees a question and nothing else of the run; a key comes from its environment and never leaves
it, not in an error either.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from deploy.config import ReviewConfig
from evaluator.review import OTHER, Ask
from exemplar_store.hacking_cases import HackingCase, most_similar
from rollout.actor import Generator
from rollout.engines import GenerationRequest
from rollout.tokenizer import ChatTokenizer, PlainTokenizer, Tokenizer
from tasks.errors import KontrastError, UsageError
from tasks.integrity import check_integrity
from tasks.records import Candidate, Evaluation, Prompt, Task
from tasks.records.base import digest
from tasks.records.evaluation import RejectionReason

CHEATS: frozenset[RejectionReason] = frozenset({
    "constant_output", "hyperparameter", "precision_downgrade", "caching", "state_leak", "lazy_output", "stream_escape",
    "timing_escape", "tampering", "forged_result", "fallback", "review",
})  # fmt: skip
"""Reasons that mean a cheat. The others are as often a mistake: wrong values, crashes, an input overwritten."""


def is_cheat(evaluation: Evaluation) -> bool:
    """Whether an evaluation confirms a cheat: by a reason that means one, with the seed that shows it again."""
    return evaluation.outcome == "rejected" and evaluation.reason in CHEATS and bool(evaluation.detail.get("seed"))


def hacking_case(
    task: Task, candidate: Candidate, evaluation: Evaluation, known: Sequence[HackingCase], run_id: str
) -> HackingCase:
    """The case that a confirmed cheat becomes; its family is the reviewer's, else that of the nearest case with its
    reason. Raises ValueError for what is no cheat."""
    if not is_cheat(evaluation):
        raise ValueError(f"{candidate.detail} is no confirmed cheat: {evaluation.outcome} {evaluation.reason}")
    reason: RejectionReason = next(word for word in get_args(RejectionReason) if word == evaluation.reason)
    if reason == "review":
        family = str(evaluation.detail["review"]["family"])
        alike = [case for case in known if case.family == family]
        reason = most_similar(candidate.source, alike, 1)[0][0].reason if alike else reason
    else:
        alike = [case for case in known if case.reason == reason]
        family = most_similar(candidate.source, alike, 1)[0][0].family if alike else OTHER
    return HackingCase(
        family=family, reason=reason, code=candidate.source, origin=f"{run_id}: {candidate.detail}",
        explanation=f"{evaluation.message} Shown on {task.id} by the seed {evaluation.detail['seed']}.".strip(),
    )  # fmt: skip


class ReviewerActor:
    """Answers questions with one engine."""

    def __init__(self, config: ReviewConfig, source: str) -> None:
        check_integrity(source)
        self._config = config
        self._generator: Generator | None = None
        self._tokenizer: Tokenizer = PlainTokenizer()
        self._starting = asyncio.Lock()

    async def ready(self) -> bool:
        """Starts the engine once; raises UsageError for a model, a device or a key that is not there."""
        async with self._starting:
            if self._generator is None:
                try:
                    self._generator = await self._start()
                except UsageError as error:
                    raise UsageError(str(error).replace("rollout.", "review.")) from error
        return True

    async def _start(self) -> Generator:
        config, folder = self._config.rollout(), None
        if config.engine != "openai":
            from rollout.model import prepare_model

            cache = Path(config.model_cache).expanduser()
            folder = str(await asyncio.to_thread(prepare_model, config.model, cache))
            self._tokenizer = await asyncio.to_thread(ChatTokenizer.load, Path(folder))
        generator = Generator(config, folder)
        await generator.ready()
        return generator

    async def ask(self, question: str) -> str:
        """The completion of one question; raises KontrastError where the engine gives none."""
        await self.ready()
        text = self._tokenizer.render([{"role": "user", "content": question}])
        name = digest("review", question)
        prompt = Prompt(
            id=f"review-{name[:16]}", run_id="", task_id="review", task_hash=name, device_type="", text=text,
            token_ids=self._tokenizer.encode(text),
        )  # fmt: skip
        if self._generator is None:
            raise RuntimeError("the reviewer was used before it was ready")
        try:
            answers = [sample.text async for sample in self._generator.generate([GenerationRequest(prompt, (0,))])]
        except KontrastError as error:
            key = os.environ.get(self._config.openai.api_key_env, "") if self._config.openai.api_key_env else ""
            raise KontrastError(str(error).replace(key, "***") if key else str(error)) from None
        return answers[0]


def start_reviewer(ray: Any, config: ReviewConfig, name: str, source: str, *, restarts: int) -> Any:
    """Starts the reviewer's actor; the caller waits for its `ready`."""
    options = {
        "name": name, "num_cpus": config.cpus, "num_gpus": config.gpus, "max_restarts": restarts,
        "max_task_retries": 0, "max_concurrency": 1000,
    }  # fmt: skip
    return ray.remote(ReviewerActor).options(**options).remote(config, source)


def ask_actor(actor: Any) -> Ask:
    """Asks a reviewer's actor; what it raises is raised here."""

    async def ask(question: str) -> str:
        from ray import exceptions

        try:
            answer: str = await actor.ask.remote(question)
        except exceptions.RayTaskError as error:
            raise error.cause if error.cause is not None else error from None
        return answer

    return ask
