"""Teachers: an engine, the prompt it is asked with, and what its answers cost.

Invariants: a teacher is asked about one task at a time and index, and its answer follows from these where its engine is
here; a prompt shows no earlier kernels, as in CUDA-L1's stage 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deploy.config import Config, TeacherConfig
from rollout import PromptTooLong, build_prompt
from rollout.config import RolloutConfig
from rollout.engines import Completion, Engine, EngineDied, GenerationRequest, create_engine
from rollout.engines.openai import EndpointError
from rollout.tokenizer import ChatTokenizer, PlainTokenizer, Tokenizer
from tasks.records import Prompt, Task
from tasks.records.group import FinishReason

PROMPT_STATUS = frozenset({400, 413, 422})
"""Refusals that are about the prompt; any other is about the endpoint."""


class TeacherRefused(Exception):
    """This task cannot be asked about; other tasks may."""


class TeacherLost(Exception):
    """Nothing more can be asked of the teacher now."""


@dataclass(frozen=True)
class Answer:
    """One answer and what it took."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    new_tokens: int
    cost: float
    seconds: float


class Teacher(Protocol):
    """Writes kernels."""

    tasks_at_once: int

    async def ask(self, task: Task, index: int) -> Answer:
        """The teacher's attempt `index` at a task. Raises TeacherRefused and TeacherLost."""

    async def close(self) -> None:
        """Ends its engine."""


class EngineTeacher:
    """A teacher by any engine."""

    def __init__(
        self, name: str, config: TeacherConfig, engine: Engine, tokenizer: Tokenizer, rollout: RolloutConfig,
        device_type: str, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`rollout` holds the prompt's settings."""
        self.tasks_at_once = config.tasks_at_once
        self._name, self._config, self._engine, self._tokenizer = name, config, engine, tokenizer
        self._rollout, self._device_type, self._clock = rollout, device_type, clock

    async def ask(self, task: Task, index: int) -> Answer:
        """See Teacher."""
        began = self._clock()
        try:
            prompt = build_prompt(
                task, (), self._tokenizer, self._rollout, run_id="augment",
                prompt_id=f"{self._name}/{task.content_hash[:12]}", device_type=self._device_type, strategy="none",
            )  # fmt: skip
        except PromptTooLong as error:
            raise TeacherRefused(str(error)) from error
        try:
            found = [one async for one in self._engine.generate([GenerationRequest(prompt, (index,))])]
        except EndpointError as error:
            raise (TeacherRefused if error.status in PROMPT_STATUS else TeacherLost)(str(error)) from error
        except EngineDied as error:
            raise TeacherLost(str(error)) from error
        return self._answer(prompt, found[0], self._clock() - began)

    async def close(self) -> None:
        """See Teacher."""
        await self._engine.close()

    def _answer(self, prompt: Prompt, completion: Completion, seconds: float) -> Answer:
        usage = completion.usage
        asked = usage.prompt_tokens if usage else len(prompt.token_ids)
        drawn = usage.new_tokens if usage else len(completion.token_ids)
        cost = (asked * self._config.price_in + drawn * self._config.price_out) / 1e6
        return Answer(completion.text, completion.finish_reason, asked, drawn, cost, seconds)


def open_teacher(name: str, teacher: TeacherConfig, config: Config, device_type: str) -> EngineTeacher:
    """Starts a teacher's engine. Raises UsageError for a missing key, model or device."""
    from rollout.model import prepare_model

    rollout = teacher.rollout().model_copy(
        update={"prompt": config.augment.prompt, "seed": config.run.seed, "model_cache": config.rollout.model_cache}
    )
    tokenizer: Tokenizer = PlainTokenizer()
    if teacher.engine != "openai":
        folder = prepare_model(teacher.model, Path(config.rollout.model_cache).expanduser())
        rollout = rollout.model_copy(update={"model": str(folder)})
        tokenizer = ChatTokenizer.load(folder)
    return EngineTeacher(name, teacher, create_engine(rollout), tokenizer, rollout, device_type)
