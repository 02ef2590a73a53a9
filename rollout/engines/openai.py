"""Any OpenAI-compatible endpoint as an engine: for data augmentation (stage 1) and for `evolve`.

It relays text: completions have no token ids and no log-probabilities, so nothing can be trained on them by GRPO.
Failures that may pass (a busy server, a lost connection) are tried again with growing waits; others end the request.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx

from rollout import metrics
from rollout.config import OpenAIConfig, SamplingConfig
from rollout.engines.base import Completion, Engine, GenerationRequest, Usage, WeightSource
from tasks.errors import KontrastError, UsageError
from tasks.records.group import FinishReason, PolicyVersion, Prompt

log = logging.getLogger(__name__)

PASSING_STATUS = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
LONGEST_WAIT_S = 60.0
NO_WEIGHTS = "the openai engine takes no weights, its model is served elsewhere: train with vllm or transformers."


class EndpointError(KontrastError):
    """The endpoint refused a request (`status` says how), or did not answer it after all attempts (`status` is 0)."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Pace:
    """Spaces requests evenly: each waits for its own place in time."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._gap_s = 60.0 / per_minute if per_minute else 0.0
        self._clock = clock
        self._next_s = -math.inf

    def wait_s(self) -> float:
        """Takes the next place; how long to wait for it."""
        now = self._clock()
        place = max(now, self._next_s)
        self._next_s = place + self._gap_s
        return place - now


class OpenAIEngine(Engine):
    """See the module. `transport` and `rng` are for tests."""

    name = "openai"

    def __init__(
        self,
        config: OpenAIConfig,
        sampling: SamplingConfig,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if not config.base_url or not config.model:
            raise UsageError("the openai engine needs rollout.openai.base_url and rollout.openai.model.")
        headers = {}
        if config.api_key_env:
            key = os.environ.get(config.api_key_env)
            if not key:
                raise UsageError(
                    f"environment variable {config.api_key_env} (rollout.openai.api_key_env) holds no key: set it, or "
                    "set that option to an empty text for an endpoint without keys."
                )
            headers["Authorization"] = f"Bearer {key}"
        self._config = config
        self._sampling = sampling
        self._rng = rng or random.Random()
        self._slots = asyncio.Semaphore(config.concurrency)
        self._pace = Pace(config.requests_per_minute)
        self._client = httpx.AsyncClient(
            base_url=config.base_url.rstrip("/"), headers=headers, timeout=config.timeout_s, transport=transport
        )

    @property
    def policy_version(self) -> PolicyVersion:
        return PolicyVersion()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        tasks = [
            asyncio.create_task(self._one(request.prompt, index)) for request in requests for index in request.indices
        ]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def begin_update(self) -> None:
        raise UsageError(NO_WEIGHTS)

    async def load_weights(self, source: WeightSource) -> None:  # noqa: ARG002
        raise UsageError(NO_WEIGHTS)

    async def finish_update(self, version: PolicyVersion) -> None:  # noqa: ARG002
        raise UsageError(NO_WEIGHTS)

    async def sleep(self) -> None:
        return None

    async def wake(self) -> None:
        return None

    async def close(self) -> None:
        await self._client.aclose()

    async def _one(self, prompt: Prompt, index: int) -> Completion:
        async with self._slots:
            answer = await self._ask(prompt)
        text, reason = _read(answer, self._config.endpoint)
        metrics.COMPLETIONS.labels(self.name, reason).inc()
        return Completion(prompt.id, index, text, (), (), (), reason, _usage(answer))

    async def _ask(self, prompt: Prompt) -> dict[str, Any]:
        chat = self._config.endpoint == "chat"
        body = {
            "model": self._config.model,
            "temperature": self._sampling.temperature,
            self._config.limit_field: self._sampling.max_tokens,
            **({"messages": [{"role": "user", "content": prompt.text}]} if chat else {"prompt": prompt.text}),
        }
        path = "/chat/completions" if chat else "/completions"
        for attempt in range(self._config.retries + 1):
            trouble, asked_wait_s = await self._try(path, body)
            if isinstance(trouble, dict):
                return trouble
            if attempt < self._config.retries:
                wait_s = min(self._config.retry_wait_s * 2**attempt, LONGEST_WAIT_S) * self._rng.uniform(0.5, 1.0)
                wait_s = min(max(wait_s, asked_wait_s), LONGEST_WAIT_S)
                log.warning("%s answered %s; next attempt in %.1f s", self._config.base_url, trouble, wait_s)
                await asyncio.sleep(wait_s)
        raise EndpointError(
            f"{self._config.base_url} gave no answer in {self._config.retries + 1} attempts, at last {trouble}: "
            "try later, or raise rollout.openai.retries."
        )

    async def _try(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any] | str, float]:
        """The answer, or what went wrong and may pass with the wait that the endpoint asked for."""
        await asyncio.sleep(self._pace.wait_s())
        try:
            response = await self._client.post(path, json=body)
        except httpx.TransportError as error:
            return f"{type(error).__name__} {error}".strip(), 0.0
        if response.status_code in PASSING_STATUS:
            return f"status {response.status_code}", _asked_wait_s(response)
        if response.status_code != 200:
            raise EndpointError(
                f"{self._config.base_url} refused the request with status {response.status_code}: "
                f"{response.text[:300]}",
                response.status_code,
            )
        try:
            return dict(response.json()), 0.0
        except (ValueError, TypeError) as error:
            raise EndpointError(f"{self._config.base_url} answered no JSON: {response.text[:300]!r}") from error


def _read(answer: dict[str, Any], endpoint: str) -> tuple[str, FinishReason]:
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if endpoint == "chat" else choice["text"]
    except (KeyError, IndexError, TypeError) as error:
        raise EndpointError(f"the endpoint's answer holds no completion: {str(answer)[:300]}") from error
    if text is not None and not isinstance(text, str):
        raise EndpointError(f"the endpoint's answer holds no text: {str(answer)[:300]}")
    return text or "", "length" if choice.get("finish_reason") == "length" else "stop"


def _usage(answer: dict[str, Any]) -> Usage | None:
    """What the endpoint counted, if it says so."""
    counted = answer.get("usage")
    if not isinstance(counted, dict):
        return None
    numbers = [counted.get(name) for name in ("prompt_tokens", "completion_tokens")]
    return Usage(*(number if isinstance(number, int) and number >= 0 else 0 for number in numbers))


def _asked_wait_s(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0
