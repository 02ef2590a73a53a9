from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from learner.config import SftDataConfig
from learner.sft_data import PairSource, analysis_of, build_pairs, data_hash, default_source, design_of, exemplars_for
from tasks.errors import UsageError
from tasks.records import Prompt, Task


@dataclass
class Seed:
    name: str
    speed: str
    reason: str
    source: str
    style: str = "torch"
    parameters: dict[str, int] = field(default_factory=dict)


class TooLong(Exception):
    """The stand-in for a prompt over its budget."""


def seeds_of(task: Task) -> list[Seed]:
    """Family `b` has no fast kernel."""
    speeds = ["slow", "middle", "fast"] if task.family == "a" else ["slow", "middle"]
    return [
        Seed(f"{speed}_way-{size}", speed, f"Reason {speed}.", f"{task.id} {speed} {size}", parameters={"ROWS": size})
        for speed in speeds
        for size in (1, 2, 4)
    ]


def source() -> PairSource:
    """Two families; odd indices are held out; a token is a character."""

    def prompt(task: Task, exemplars: Any, style: str) -> Prompt:
        text = task.source + "".join(f"{e.speedup}{e.source}" for e in exemplars)
        return Prompt(
            id="p", run_id="r", task_id=task.id, task_hash=task.content_hash, device_type="cpu", text=text,
            token_ids=tuple(text.encode()), exemplar_hashes=tuple(e.candidate_hash for e in exemplars),
        )  # fmt: skip

    return PairSource(
        families=("a", "b"),
        generate=lambda family, index: Task(id=f"{family}/{index}", source=f"task {family} {index}", family=family),
        seed_kernels=seeds_of,
        split_of=lambda task: "train" if int(task.id.split("/")[1]) % 2 == 0 else "held_out_composition",
        build_prompt=prompt,
        render_completion=lambda analysis, design, code: f"{analysis}|{design}|{code}",
        encode=lambda text: (*text.encode(), 0),
        too_long=TooLong,
        max_completion_tokens=500,
    )


CONFIG = SftDataConfig(pairs=300, held_out_pairs=40, instances=50, seed=3)


def test_pairs_follow_from_the_seed_and_a_prefix_is_the_shorter_set() -> None:
    pairs = list(build_pairs(source(), CONFIG))
    assert data_hash(pairs) == data_hash(list(build_pairs(source(), CONFIG)))
    assert list(build_pairs(source(), CONFIG.model_copy(update={"pairs": 20}))) == pairs[:20]
    assert list(build_pairs(source(), CONFIG, numbers=range(50, 60))) == pairs[50:60]
    other = list(build_pairs(source(), CONFIG.model_copy(update={"seed": 4})))
    assert data_hash(other) != data_hash(pairs)


def test_families_have_equal_shares_and_so_have_the_speeds_within_them() -> None:
    """300 pairs: 150 +- 40 a family; family a about 50 of each speed, family b about 75 of the two that it has."""
    pairs = list(build_pairs(source(), CONFIG))
    families = Counter(pair.task_id[0] for pair in pairs)
    assert 110 <= families["a"] <= 190
    for family, speeds in (("a", ("slow", "middle", "fast")), ("b", ("slow", "middle"))):
        counts = Counter(pair.speed for pair in pairs if pair.task_id[0] == family)
        assert set(counts) == set(speeds)
        assert min(counts.values()) > 0.7 * families[family] / len(speeds)


def test_only_training_tasks_and_a_target_is_never_shown() -> None:
    for pair in build_pairs(source(), CONFIG):
        assert int(pair.task_id.split("/")[1]) % 2 == 0
        text = bytes(pair.sequence.prompt_ids).decode()
        target = bytes(pair.sequence.completion_ids[:-1]).decode().split("|")[2]
        assert target not in text


def test_held_out_pairs_are_of_tasks_that_training_never_draws() -> None:
    trained = {pair.task_id for pair in build_pairs(source(), CONFIG)}
    held_out = {pair.task_id for pair in build_pairs(source(), CONFIG, held_out=True)}
    assert held_out
    assert not trained & held_out


def test_exemplars_come_in_the_configured_shares_of_two_classes_worst_first() -> None:
    counts = Counter(pair.exemplars for pair in build_pairs(source(), CONFIG))
    assert 0.05 < counts[0] / 300 < 0.25
    assert counts[2] / 300 > 0.6
    import random

    task = source().generate("a", 0)
    for number in range(20):
        shown = exemplars_for(task, seeds_of(task), 2, random.Random(number), "cpu")
        assert shown[0].speedup <= shown[1].speedup
        assert shown[0].origin.split("-")[0] != shown[1].origin.split("-")[0]


def test_sentences_by_hand() -> None:
    slow, fast = Seed("s", "slow", "Calls cost time.", ""), Seed("b", "fast", "Blocks stay in cache.", "")
    assert analysis_of([]) == "There is no earlier kernel to compare."
    assert analysis_of([slow]) == "The earlier kernel is slow because calls cost time."
    assert (
        analysis_of([slow, fast]) == "The last is faster because blocks stay in cache; in the first, calls cost time."
    )
    assert design_of(Seed("tiny_blocks-8", "slow", "Calls cost time.", "", parameters={"ROWS": 8})) == (
        "Use tiny blocks of 8: calls cost time."
    )


def test_limits_that_nothing_fits_are_said_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="allow longer prompts or completions"):
        next(build_pairs(replace(source(), max_completion_tokens=5), CONFIG))


def test_a_prompt_over_its_budget_is_not_used() -> None:
    def refuse(task: Task, exemplars: Any, style: str) -> Prompt:
        if len(exemplars) == 2:
            raise TooLong
        return source().build_prompt(task, exemplars, style)

    assert {pair.exemplars for pair in build_pairs(replace(source(), build_prompt=refuse), CONFIG)} == {0, 1}


class Letters:
    """A tokenizer of characters, as rollout wants one."""

    end_token_id = 0

    def render(self, messages: Any) -> str:
        return "\n".join(message["content"] for message in messages)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def count(self, text: str) -> int:
        return len(text.encode())

    def decode(self, token_ids: Any) -> str:
        return bytes(token_ids).decode()


def test_real_tasks_and_prompts_give_readable_targets_of_the_train_split() -> None:
    """Twelve pairs of the procedural suite: rollout's parser reads each completion's code back."""
    from rollout import parse_completion
    from tasks import procedural
    from tasks.splits import split_of

    config = SftDataConfig(pairs=12, instances=40)
    pairs = list(
        build_pairs(default_source(Letters(), config, max_prompt_tokens=2500, max_completion_tokens=1500), config)
    )
    for pair in pairs:
        family, _, index = pair.task_id.removeprefix("procedural:").partition("/")
        task = procedural.generate(family, int(index), size="cpu")
        assert split_of(task) == "train"
        parsed = parse_completion(bytes(pair.sequence.completion_ids[:-1]).decode())
        assert parsed.source in {seed.source.strip("\n") for seed in procedural.seed_kernels(task)}
        assert parsed.analysis
        assert parsed.design
