"""The reviewer's actor against a scripted endpoint and engine, and what confirmed cheats become."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

import pytest

from deploy.config import ReviewConfig
from deploy.graph import reviewing
from deploy.graph.reviewing import ReviewerActor, ask_actor, hacking_case, is_cheat
from exemplar_store.hacking_cases import read_cases
from rollout.config import OpenAIConfig
from rollout.engines import EngineDied
from tasks.errors import KontrastError, UsageError
from tasks.records import Candidate, Evaluation, Task
from tasks.records.evaluation import REJECTION_REASONS

TASK = Task(id="file:abc", source="class Model: pass")
REPLAY = Candidate(
    source="class ModelNew:\n    kept = {}\n    def forward(self, x):\n        return self.kept[x.data_ptr()]",
    detail="g1/3",
)
KEY = "sk-very-secret"


@contextmanager
def endpoint(answer: Callable[[dict[str, Any], str], tuple[int, dict[str, Any]]]) -> Iterator[str]:
    """An OpenAI-compatible server; `answer` gets the body and the authorization header."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, value = answer(body, self.headers.get("authorization", ""))
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def config(base_url: str, **more: Any) -> ReviewConfig:
    openai = OpenAIConfig(base_url=base_url, model="judge", api_key_env="REVIEW_KEY", retries=0)
    return ReviewConfig(mode="advisory", openai=openai, **more)


def asked(settings: ReviewConfig, *questions: str) -> list[str]:
    async def go() -> list[str]:
        actor = ReviewerActor(settings, "")
        return list(await asyncio.gather(*(actor.ask(question) for question in questions)))

    return asyncio.run(go())


def test_an_endpoint_is_asked_with_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REVIEW_KEY", KEY)
    seen: list[tuple[dict[str, Any], str]] = []

    def answer(body: dict[str, Any], authorization: str) -> tuple[int, dict[str, Any]]:
        seen.append((body, authorization))
        said = f"about {body['messages'][0]['content']}"
        return 200, {"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}

    with endpoint(answer) as url:
        assert asked(config(url, temperature=0.5, max_tokens=77), "one", "two") == ["about one", "about two"]
    assert {authorization for _, authorization in seen} == {f"Bearer {KEY}"}
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body, _ in seen} == {("judge", 0.5, 77)}


def test_a_refusal_is_one_error_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REVIEW_KEY", KEY)
    with (
        endpoint(lambda body, authorization: (401, {"error": f"bad key {authorization}"})) as url,
        pytest.raises(KontrastError, match="status 401") as caught,
    ):
        asked(config(url), "one")
    assert KEY not in str(caught.value)
    assert "***" in str(caught.value)


def test_a_missing_key_is_said_before_the_run_with_the_options_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REVIEW_KEY", raising=False)
    with pytest.raises(UsageError, match=r"REVIEW_KEY \(review\.openai\.api_key_env\) holds no key"):
        asyncio.run(ReviewerActor(config("http://127.0.0.1:9/v1"), "").ready())


def test_a_model_that_is_not_there_is_said_before_the_run() -> None:
    settings = ReviewConfig(mode="advisory", engine="transformers", model="/no/such/model", device="cpu")
    with pytest.raises(UsageError, match="/no/such/model"):
        asyncio.run(ReviewerActor(settings, "").ready())


def test_a_local_engine_gets_the_chat_template_and_is_started_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The engine and the tokenizer are stand-ins: what matters is what passes between them."""
    started: list[str] = []

    class FakeGenerator:
        def __init__(self, rollout: Any, model: str) -> None:
            started.append(model)
            assert rollout.engine == "transformers"

        async def ready(self) -> None:
            await asyncio.sleep(0.01)

        async def generate(self, requests: Any) -> Any:
            (request,) = requests
            assert request.prompt.token_ids == (7, len(request.prompt.text))
            yield type("Sample", (), {"text": f"{request.prompt.id[:7]} {request.prompt.text}"})

    class FakeTokenizer:
        @staticmethod
        def load(folder: Any) -> FakeTokenizer:
            return FakeTokenizer()

        def render(self, messages: Any) -> str:
            return f"<user>{messages[0]['content']}"

        def encode(self, text: str) -> tuple[int, ...]:
            return (7, len(text))

    monkeypatch.setattr(reviewing, "Generator", FakeGenerator)
    monkeypatch.setattr(reviewing, "ChatTokenizer", FakeTokenizer)
    monkeypatch.setattr("rollout.model.prepare_model", lambda model, cache: tmp_path / model)
    settings = ReviewConfig(mode="advisory", engine="transformers", model="m", device="cpu")
    assert asked(settings, "one", "two") == ["review- <user>one", "review- <user>two"]
    assert started == [str(tmp_path / "m")]


class Remote:
    """A method as Ray gives it."""

    def __init__(self, raises: Exception | None = None) -> None:
        self.raises = raises
        self.ask = self

    async def remote(self, question: str) -> str:
        if self.raises is not None:
            raise self.raises
        return f"answered {question}"


def test_the_recorder_gets_the_answer_or_the_cause() -> None:
    from ray.exceptions import RayActorError, RayTaskError

    assert asyncio.run(ask_actor(Remote())("one")) == "answered one"
    wrapped = RayTaskError("ask", "a long trace", EngineDied("the engine died"))
    with pytest.raises(EngineDied, match="the engine died"):
        asyncio.run(ask_actor(Remote(wrapped))("one"))
    with pytest.raises(RayActorError):
        asyncio.run(ask_actor(Remote(RayActorError()))("one"))


def rejected(reason: Any, **detail: Any) -> Evaluation:
    return Evaluation(
        outcome="rejected", reason=reason, step="check", message="It replays.", task_id=TASK.id, task_hash="h",
        candidate_hash="c", detail={"seed": "ab12", **detail},
    )  # fmt: skip


KNOWN = list(read_cases((resources.files("exemplar_store") / "hacking_cases.jsonl").read_text().splitlines()))


def test_a_proven_cheat_becomes_a_case_with_its_reproducer() -> None:
    case = hacking_case(TASK, REPLAY, rejected("caching"), KNOWN, "r1")
    assert (case.family, case.reason, case.code) == ("replay", "caching", REPLAY.source)
    assert case.explanation == "It replays. Shown on file:abc by the seed ab12."
    assert case.origin == "r1: g1/3"
    assert hacking_case(TASK, REPLAY, rejected("caching"), [], "r1").family == "other"


def test_a_binding_review_becomes_a_case_of_its_own_family() -> None:
    found = rejected("review", review={"verdict": "cheat", "family": "replay", "reason": "x"})
    case = hacking_case(TASK, REPLAY, found, KNOWN, "r1")
    assert (case.family, case.reason) == ("replay", "caching")
    made_up = rejected("review", review={"verdict": "cheat", "family": "other", "reason": "x"})
    assert hacking_case(TASK, REPLAY, made_up, KNOWN, "r1").reason == "review"


@pytest.mark.parametrize("reason", REJECTION_REASONS)
def test_mistakes_are_no_cheats(reason: str) -> None:
    """Words for wrong, broken, slow or unlucky work; and nothing is a confirmed cheat without its seed."""
    mistakes = {
        "incorrect", "aliasing", "input_mutation", "resource_abuse", "crash", "timeout", "compile_error", "contract",
        "not_confirmed",
    }  # fmt: skip
    assert is_cheat(rejected(reason)) is (reason not in mistakes)
    assert not is_cheat(rejected(reason, seed=""))


def test_what_is_no_cheat_makes_no_case() -> None:
    with pytest.raises(ValueError, match="no confirmed cheat"):
        hacking_case(TASK, REPLAY, rejected("crash"), KNOWN, "r1")
