from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.config import PromptConfig, RolloutConfig
from rollout.prompt import PromptTooLong, build_prompt, format_speedup, prompt_messages
from rollout.tokenizer import PlainTokenizer
from tasks.records import Exemplar, Measurement, Prompt, Task


class Words:
    """One token per word: budgets can be counted by hand."""

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        return "\n".join(message["content"] for message in messages)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(range(len(text.split())))

    def count(self, text: str) -> int:
        return len(text.split())

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


def _build(
    task: Task,
    exemplars: Sequence[Exemplar],
    *,
    max_tokens: int = 5000,
    template: str = "compact",
    alternatives: Sequence[Sequence[Exemplar]] = (),
    style: str = "torch",
    device: str = "cpu",
) -> Prompt:
    config = RolloutConfig(
        prompt=PromptConfig.model_validate({"template": template, "max_tokens": max_tokens, "kernel_style": style})
    )
    return build_prompt(
        task, exemplars, Words(), config, run_id="r", prompt_id="p", device_type=device, alternatives=alternatives
    )


def test_golden_compact_prompt(task: Task, exemplar_of: Callable[..., Exemplar]) -> None:
    fast, slow = exemplar_of("fast = 1\n", 1.528), exemplar_of("slow = 1\n", 0.81)
    prompt = _build(task, [fast, slow], style="triton")
    assert prompt.text == (
        "Write a faster ModelNew with the results of Model.\n"
        "```python\nimport torch\n\nclass Model(torch.nn.Module):\n    pass\n```\n"
        "Speedup 0.81x:\n```python\nslow = 1\n```\n"
        "Speedup 1.53x:\n```python\nfast = 1\n```\n"
        "Use Triton. Answer with ## Performance Analysis, ## Algorithm Design, ## Code Implementation."
    )
    assert prompt.exemplar_speedups == (0.81, 1.528)
    assert prompt.exemplar_hashes == ("slow = 1", "fast = 1")
    assert (prompt.id, prompt.run_id, prompt.task_hash) == ("p", "r", task.content_hash)


def test_the_contrastive_prompt_has_all_sections_in_the_papers_order(
    task: Task, exemplar_of: Callable[..., Exemplar]
) -> None:
    text = _build(
        task, [exemplar_of("a = 1", 0.5), exemplar_of("b = 2", 2.0)], template="contrastive", device="H100"
    ).text
    order = [
        "an expert in CUDA", "# Reference", task.source.strip(), "# Earlier implementation 1, measured speedup 0.50x",
        "a = 1", "# Earlier implementation 2, measured speedup 2.00x", "b = 2", "# How to answer",
        "## Performance Analysis", "1. Which", "2. Which", "3. What", "4. Which", "5. Where", "## Algorithm Design",
        "## Code Implementation", "# Requirements", "H100 GPU", "# Restrictions", "No caching", "hyper-parameters",
    ]  # fmt: skip
    place = 0
    for piece in order:
        place = text.index(piece, place)


@pytest.mark.parametrize("template", ["compact", "contrastive"])
@pytest.mark.parametrize("shown", [0, 1, 2])
def test_no_slot_is_left_open(template: str, shown: int, task: Task, exemplar_of: Callable[..., Exemplar]) -> None:
    exemplars = [exemplar_of(f"x = {i}", 1.0 + i) for i in range(shown)]
    for style in ("torch", "c", "triton", "cuda"):
        text = _build(task, exemplars, template=template, style=style).text
        assert "$" not in text
        assert "<!--" not in text
        assert all(f"{1 + i}.00x" in text for i in range(shown))
        assert ("earlier implementations" in text.lower()) == (template == "contrastive" and shown > 0)


def test_code_that_looks_like_slots_stays_as_it_is(task: Task, exemplar_of: Callable[..., Exemplar]) -> None:
    text = _build(task, [exemplar_of("x = '$reference ${hint} $$'", 1.0)]).text
    assert "x = '$reference ${hint} $$'" in text


def test_exemplars_are_dropped_worst_first(task: Task, exemplar_of: Callable[..., Exemplar]) -> None:
    """Reference alone has `base` words; 20-word exemplars with 4 words of heading and fences each: one fits."""
    base = len(_build(task, []).token_ids)
    slow, fast = exemplar_of("s " * 20, 0.5), exemplar_of("f " * 20, 2.0)
    prompt = _build(task, [slow, fast], max_tokens=max(64, base + 30))
    assert len(prompt.token_ids) <= max(64, base + 30)
    assert prompt.exemplar_speedups == (2.0,)


def test_a_shorter_exemplar_of_the_bucket_is_shown_instead(task: Task, exemplar_of: Callable[..., Exemplar]) -> None:
    """Limit leaves 60 words: 50 + 4 and 5 + 4 would be 63, so the long one gives way."""
    base = len(_build(task, []).token_ids)
    long, short = exemplar_of("l " * 50, 2.0), exemplar_of("s " * 5, 0.5)
    neighbours = [exemplar_of("n " * 10, 2.1), exemplar_of("m " * 30, 1.9), exemplar_of("o " * 60, 2.05)]
    prompt = _build(task, [short, long], max_tokens=base + 60, alternatives=[[], neighbours])
    assert prompt.exemplar_speedups == (0.5, 1.9)


def test_the_same_candidate_is_never_shown_twice(task: Task, exemplar_of: Callable[..., Exemplar]) -> None:
    one = exemplar_of("a = 1", 1.0)
    assert _build(task, [one, one]).exemplar_hashes == ("a = 1",)


def test_a_reference_that_does_not_fit(task: Task) -> None:
    long = Task(id="file:long", source="x = 1\n" * 100)
    with pytest.raises(PromptTooLong, match=r"file:long has \d+ tokens .* = 64"):
        _build(long, [], max_tokens=64)


SPEEDUPS = st.floats(min_value=0.05, max_value=50)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), SPEEDUPS), max_size=3),
    others=st.lists(st.integers(1, 60), max_size=12),
    limit=st.integers(64, 200),
)
def test_any_prompt_keeps_its_budget_and_shows_whole_sources(
    lengths: list[tuple[int, float]], others: list[int], limit: int
) -> None:
    def make(name: str, words: int, speedup: float) -> Exemplar:
        source = " ".join(f"{name}{i}" for i in range(words))
        return Exemplar(
            task_id="t", task_hash="h", device_type="cpu", source=source, candidate_hash=name, speedup=speedup,
            measurement=Measurement(
                speedup=speedup, ci_low=speedup, ci_high=speedup, reference_ms=1, candidate_ms=1, pairs=1
            ),
        )  # fmt: skip

    task = Task(id="t", source="class Model: ...")
    exemplars = [make(f"e{i}_", words, speedup) for i, (words, speedup) in enumerate(lengths)]
    pool = [make(f"o{i}_", words, 1.0) for i, words in enumerate(others)]
    prompt = _build(task, exemplars, max_tokens=limit, alternatives=[pool] * len(exemplars))
    assert len(prompt.token_ids) <= limit
    assert list(prompt.exemplar_speedups) == sorted(prompt.exemplar_speedups)
    by_hash = {one.candidate_hash: one for one in [*exemplars, *pool]}
    assert all(f"```python\n{by_hash[hash_].source}\n```" in prompt.text for hash_ in prompt.exemplar_hashes)


def test_speedups_keep_their_digits() -> None:
    assert [format_speedup(x) for x in (1.0, 0.123, 0.01234, 12.345)] == ["1.00x", "0.12x", "0.0123x", "12.35x"]


def test_plain_prompts_have_no_token_ids(task: Task) -> None:
    prompt = build_prompt(task, [], PlainTokenizer(), RolloutConfig(), run_id="r", prompt_id="p", device_type="cpu")
    assert prompt.token_ids == ()
    assert prompt.text.startswith("Write a faster ModelNew")
    assert PlainTokenizer().count("abcd") == 2


def test_messages_start_with_our_own_system_message(task: Task) -> None:
    """A chat template may add a system message of its own when there is none, at a cost in tokens."""
    for template in ("compact", "contrastive"):
        roles = [
            m["role"] for m in prompt_messages(task, [], PromptConfig.model_validate({"template": template}), "cpu")
        ]
        assert roles == ["system", "user"]
