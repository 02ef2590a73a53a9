from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rollout.config import OpenAIConfig, SamplingConfig
from rollout.engines import Completion, GenerationRequest
from rollout.engines.base import Usage
from rollout.engines.openai import EndpointError, OpenAIEngine, Pace
from tasks.errors import UsageError
from tasks.records import PolicyVersion, Prompt

PROMPT = Prompt(id="p", run_id="r", task_id="t", task_hash="h", device_type="cpu", text="Write it.")
CONFIG = OpenAIConfig(base_url="http://host/v1", model="m", api_key_env="", retries=2, retry_wait_s=0.001)


def _answer(text: str, finish_reason: str = "stop") -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"content": text}, "finish_reason": finish_reason}]})


def _draw(
    handler: Callable[[httpx.Request], httpx.Response], config: OpenAIConfig = CONFIG, samples: int = 1
) -> list[Completion]:
    async def run() -> list[Completion]:
        engine = OpenAIEngine(
            config, SamplingConfig(max_tokens=7), transport=httpx.MockTransport(handler), rng=random.Random(0)
        )
        try:
            return [one async for one in engine.generate([GenerationRequest(PROMPT, tuple(range(samples)))])]
        finally:
            await engine.close()

    return asyncio.run(run())


def test_the_request_and_the_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return _answer("code", "length")

    monkeypatch.setenv("SOME_KEY", "secret")
    (completion,) = _draw(handler, CONFIG.model_copy(update={"api_key_env": "SOME_KEY"}))
    assert completion == Completion("p", 0, "code", (), (), (), "length")
    assert str(seen[0].url) == "http://host/v1/chat/completions"
    assert seen[0].headers["authorization"] == "Bearer secret"
    assert json.loads(seen[0].content) == {
        "model": "m", "temperature": 1.0, "max_tokens": 7, "messages": [{"role": "user", "content": "Write it."}],
    }  # fmt: skip


def test_the_completions_endpoint() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/completions"
        assert json.loads(request.content)["prompt"] == "Write it."
        return httpx.Response(200, json={"choices": [{"text": "code", "finish_reason": "stop"}]})

    assert _draw(handler, CONFIG.model_copy(update={"endpoint": "completions"}))[0].text == "code"


@pytest.mark.parametrize(("counted", "usage"), [
    ({"prompt_tokens": 12, "completion_tokens": 5}, Usage(12, 5)), ({"prompt_tokens": None}, Usage(0, 0)),
    (None, None), ("many", None),
])  # fmt: skip
def test_the_endpoints_own_count_of_tokens_travels_with_the_completion(counted: Any, usage: Usage | None) -> None:
    answer = {"choices": [{"message": {"content": "code"}}], "usage": counted}
    assert _draw(lambda request: httpx.Response(200, json=answer))[0].usage == usage


def test_the_limit_of_tokens_has_the_name_that_the_endpoint_knows() -> None:
    bodies: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return _answer("x")

    _draw(handler, CONFIG.model_copy(update={"limit_field": "max_completion_tokens"}))
    assert bodies[0]["max_completion_tokens"] == 7
    assert "max_tokens" not in bodies[0]


def test_requests_keep_their_pace() -> None:
    """120 a minute are one each 0.5 s; a place that was not used is not made up for."""
    now = 0.0
    pace = Pace(120.0, clock=lambda: now)
    assert [pace.wait_s() for _ in range(3)] == [0.0, 0.5, 1.0]
    now = 10.0
    assert [pace.wait_s() for _ in range(2)] == [0.0, 0.5]
    assert [Pace(0.0, clock=lambda: now).wait_s() for _ in range(3)] == [0.0] * 3


def test_further_attempts_keep_the_pace_too() -> None:
    """1200 a minute are one each 50 ms: three attempts take 100 ms at least."""
    began = time.monotonic()
    with pytest.raises(EndpointError):
        _draw(lambda request: httpx.Response(503), CONFIG.model_copy(update={"requests_per_minute": 1200.0}))
    assert time.monotonic() - began > 0.09


def test_every_index_leaves_once() -> None:
    completions = _draw(lambda request: _answer("x"), samples=20)
    assert sorted(one.index for one in completions) == list(range(20))


def test_failures_that_may_pass_are_tried_again() -> None:
    answers = iter([httpx.Response(429, headers={"retry-after": "0.001"}), httpx.ConnectError("gone"), _answer("late")])

    def handler(request: httpx.Request) -> httpx.Response:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert _draw(handler)[0].text == "late"


def test_attempts_are_bounded() -> None:
    calls: list[int] = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(1)
        return httpx.Response(503)

    with pytest.raises(EndpointError, match="3 attempts, at last status 503"):
        _draw(handler)
    assert len(calls) == 3


def test_refusals_are_not_tried_again() -> None:
    calls: list[int] = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(1)
        return httpx.Response(401, text="bad key")

    with pytest.raises(EndpointError, match="401: bad key") as raised:
        _draw(handler)
    assert raised.value.status == 401
    assert len(calls) == 1


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(200, text="<html>"), httpx.Response(200, json={"choices": []}), httpx.Response(200, json=[1, 2]),
        httpx.Response(200, json={"choices": [{"message": {"content": ["parts"]}}]}),
    ],
    ids=["html", "empty", "list", "parts"],
)  # fmt: skip
def test_answers_that_are_none(response: httpx.Response) -> None:
    with pytest.raises(EndpointError, match=r"no JSON|no completion|no text"):
        _draw(lambda request: response)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"rollout\.openai\.base_url"):
        OpenAIEngine(OpenAIConfig(), SamplingConfig())
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(UsageError, match="NO_SUCH_KEY"):
        OpenAIEngine(CONFIG.model_copy(update={"api_key_env": "NO_SUCH_KEY"}), SamplingConfig())


def test_it_takes_no_weights() -> None:
    engine = OpenAIEngine(CONFIG, SamplingConfig())
    with pytest.raises(UsageError, match="takes no weights"):
        asyncio.run(engine.finish_update(PolicyVersion(step=1)))
