"""Further turns: what the policy is told of its answer, and how a conversation keeps its budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollout.config import PromptConfig, RolloutConfig, SamplingConfig
from rollout.prompt import build_prompt
from rollout.turns import cut, feedback, next_turn
from tasks.records import Evaluation, Measurement, Prompt, Task


class Words:
    """One token per word."""

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(range(len(text.split())))

    def count(self, text: str) -> int:
        return len(text.split())

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


def config(turns: int = 3, *, prompt: int = 200, answer: int = 20, told: int = 40) -> RolloutConfig:
    return RolloutConfig(
        turns=turns, prompt=PromptConfig(max_tokens=prompt, feedback_tokens=told),
        sampling=SamplingConfig(max_tokens=answer),
    )  # fmt: skip


def judged(speedup: float | None = None, reason: Any = None, *, protocol: Any = "reward", **more: Any) -> Evaluation:
    timing = None
    if speedup is not None:
        timing = Measurement(
            speedup=speedup, ci_low=speedup - 0.1, ci_high=speedup + 0.1, reference_ms=2, candidate_ms=1, pairs=20,
            protocol=protocol,
        )  # fmt: skip
    return Evaluation(
        outcome="rejected" if timing is None else "accepted", reason=reason, step="check", measurement=timing,
        task_id="t", task_hash="h", candidate_hash="c", protocol=protocol, **more,
    )  # fmt: skip


def first_of(task: Task, settings: RolloutConfig) -> Prompt:
    return build_prompt(task, [], Words(), settings, run_id="r", prompt_id="p", device_type="cpu")


def test_what_is_told_by_hand() -> None:
    """An accepted answer brings the score that it is paid by, as exemplars show theirs; a mistake its evidence; a cheat
    its reason alone."""
    told = config()
    assert feedback(judged(1.5), told, 100) == "Speedup 1.40x. Write a faster one."
    assert feedback(judged(1.5, protocol="sequential"), told, 100) == "Speedup 1.50x. Write a faster one."
    broken = judged(reason="compile_error", detail={"compiler": "k.cu(3): error: no\nk.cu(9): error: too"})
    assert feedback(broken, told, 20) == ("Rejected: compile error.\n```\nk.cu(3): error: no\n```\nWrite a right one.")
    wrong = judged(reason="incorrect", message="Output 0 differs at [3].", detail={"seed": 7})
    assert feedback(wrong, told, 100) == "Rejected: incorrect.\n```\nOutput 0 differs at [3].\n```\nWrite a right one."
    cheat = judged(reason="stream_escape", message="Work was left on stream 7.", detail={"compiler": "x"})
    assert feedback(cheat, told, 100) == "Rejected: stream escape.\nWrite a right one."
    long = told.model_copy(update={"prompt": PromptConfig(template="contrastive")})
    assert "measured speedup over the reference is 1.40x" in feedback(judged(1.5), long, 100)


@pytest.mark.parametrize(
    ("text", "limit", "kept"),
    [("ab\ncd\nef", 99, "ab\ncd\nef"), ("ab\ncd\nef", 7, "ab\ncd"), ("abcdef", 4, "abcd"), ("ab\ncd", 0, "")],
)
def test_a_text_is_cut_at_its_end_between_lines(text: str, limit: int, kept: str) -> None:
    assert cut(text, limit) == kept


def test_a_conversation_keeps_its_turns_in_order(task: Task) -> None:
    settings = config()
    first = first_of(task, settings)
    assert (first.turns, first.turn) == (3, 0)
    second = next_turn(first, [("answer one", judged(reason="crash", message="It died."))], Words(), settings)
    third = next_turn(
        first, [("answer one", judged(reason="crash", message="It died.")), ("answer two", judged(1.5))], Words(),
        settings,
    )  # fmt: skip
    assert (second.id, second.turn, third.turn) == ("p", 1, 2)
    assert second.text == (
        f"{first.text}\nassistant: answer one\nuser: Rejected: crash.\n```\nIt died.\n```\nWrite a right one."
    )
    assert third.text == f"{second.text}\nassistant: answer two\nuser: Speedup 1.40x. Write a faster one."
    assert len(third.token_ids) == len(third.text.split())


def test_what_is_too_long_gives_way_in_order(task: Task) -> None:
    """Evidence is cut first; then the earliest answer goes; if one answer alone is too long, the task is asked anew."""
    settings = config(prompt=64, answer=5, told=32)
    first = first_of(task, settings)
    room = 64 + 2 * (5 + 32)
    noise = judged(reason="compile_error", detail={"compiler": "\n".join(["word " * 5] * 80)})
    fits = next_turn(first, [("one", noise), ("two", noise)], Words(), settings)
    assert len(fits.token_ids) <= room
    assert "assistant: one" in fits.text
    assert 0 < fits.text.count("word") < 100
    long_answer = " ".join(["code"] * 110)
    shorter = next_turn(first, [(long_answer, noise), ("two", noise)], Words(), settings)
    assert "code" not in shorter.text
    assert "assistant: two" in shorter.text
    anew = next_turn(first, [(long_answer, noise)], Words(), settings)
    assert (anew.text, anew.turn) == (first.text, 1)


def test_the_context_holds_every_turn() -> None:
    """200 + 3 answers of 20 + 2 feedbacks of 40 = 340; one turn needs no feedback."""
    assert config().context_tokens == 340
    assert config(turns=1).context_tokens == 220


def test_a_single_turn_keeps_no_messages(task: Task) -> None:
    assert first_of(task, config(turns=1)).messages == ()
