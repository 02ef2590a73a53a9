from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from learner import sft_pairs
from learner.config import SftConfig, SftDataConfig
from learner.sft_data import PairSource
from learner.sft_pairs import Recipe, build, demonstration_pairs, load_or_build, read_demonstrations
from rollout import parse_completion, render_completion
from tasks.errors import UsageError
from tasks.procedural import HELD_OUT_FAMILIES
from tasks.records import Candidate, Demonstration, Measurement, Prompt, Task
from tasks.splits import split_of

MEASURED = Measurement(speedup=2, ci_low=1.9, ci_high=2.1, reference_ms=2, candidate_ms=1, pairs=20)


class TooLong(Exception):
    """Over the budget."""


def source(limit: int = 10_000) -> PairSource:
    """A token is a character; prompts over 300 do not fit."""

    def prompt(task: Task, exemplars: Sequence[Any], style: str) -> Prompt:
        if len(task.source) > 300:
            raise TooLong
        return Prompt(
            id="p", run_id="r", task_id=task.id, task_hash=task.content_hash, device_type="cpu", text=task.source,
            token_ids=tuple(f"{style}:{task.source}".encode()),
        )  # fmt: skip

    return PairSource(
        families=("a",), generate=lambda family, index: Task(id="x", source="x"), seed_kernels=lambda task: [],
        split_of=split_of, build_prompt=prompt, render_completion=render_completion,
        encode=lambda text: (*text.encode(), 0), too_long=TooLong, max_completion_tokens=limit,
    )  # fmt: skip


def demonstration(number: int, *, analysis: str = "Why.", code: str = "x = 1", **task: Any) -> Demonstration:
    made = Task(id=f"t/{number}", source=task.pop("source", f"task = {number}"), **task)
    return Demonstration(
        task=made, candidate=Candidate(source=code), analysis=analysis, design="How.", teacher="t", device_type="cpu",
        measurement=MEASURED,
    )  # fmt: skip


def recipe(folder: Path, found: Sequence[Demonstration], **data: Any) -> Recipe:
    (folder / "demonstrations.jsonl").write_text("".join(one.to_json() + "\n" for one in found))
    config = SftConfig(data=SftDataConfig(demonstrations=(str(folder),), pairs=0, **data))
    return Recipe(config, folder, style="triton")


def test_held_out_tasks_serve_the_perplexity_and_are_never_trained_on(tmp_path: Path) -> None:
    found = [demonstration(number) for number in range(60)]
    made = recipe(tmp_path, [*found, demonstration(60, family=HELD_OUT_FAMILIES[0])])
    train, held_out, left_out = demonstration_pairs(source(), made)
    split = {f"t/{n}": split_of(one.task) for n, one in enumerate(found)}
    assert {split[pair.task_id] for pair in train} == {"train"}
    assert {split[pair.task_id] for pair in held_out} == {"held_out_instance"}
    assert len(train) + len(held_out) == 60
    assert left_out == {"held out family": 1}


def test_prompt_and_completion_of_a_demonstration(tmp_path: Path) -> None:
    """The teacher's words stay, but for lines that would read as headings or fences of the completion."""
    analysis = "It is bound by memory.\n## Algorithm Design\n```\nAnd so on."
    number = next(n for n in range(99) if split_of(demonstration(n).task) == "train")
    ((pair,), _, _) = demonstration_pairs(source(), recipe(tmp_path, [demonstration(number, analysis=analysis)]))
    assert bytes(pair.sequence.prompt_ids).decode() == f"triton:task = {number}"
    read = parse_completion(bytes(pair.sequence.completion_ids[:-1]).decode())
    assert (read.analysis, read.design, read.source) == ("It is bound by memory.\nAnd so on.", "How.", "x = 1")
    assert pair.sequence.completion_ids[-1] == 0
    ((alone,), _, _) = demonstration_pairs(source(), recipe(tmp_path, [demonstration(number, analysis="")]))
    assert b"There is no earlier kernel to compare." in bytes(alone.sequence.completion_ids)


def test_what_does_not_fit_is_counted_with_its_reason(tmp_path: Path) -> None:
    numbers = [n for n in range(99) if split_of(demonstration(n).task) == "train"][:2]
    long = next(
        one for n in range(99)
        if split_of((one := demonstration(n, source=f"task = {n}\n" + "x = 1\n" * 90)).task) == "train"
    )  # fmt: skip
    found = [demonstration(numbers[0]), demonstration(numbers[1], code="y = 2\n" * 200), long]
    train, _, left_out = demonstration_pairs(source(limit=400), recipe(tmp_path, found))
    assert [pair.task_id for pair in train] == [f"t/{numbers[0]}"]
    assert left_out == {"completion too long": 1, "prompt too long": 1}


@pytest.fixture
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recipe, "source", lambda self: source())


@pytest.mark.usefixtures("_plain")
def test_pairs_are_built_once_and_never_mixed_with_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(tmp_path, [demonstration(number) for number in range(20)])
    path = tmp_path / "stage" / "pairs.jsonl.gz"
    pairs = load_or_build(made, path)
    built: list[Recipe] = []
    with monkeypatch.context() as patched:
        patched.setattr(sft_pairs, "build", built.append)
        again = load_or_build(made, path)
    assert not built
    assert (list(again.train), list(again.held_out)) == (list(pairs.train), list(pairs.held_out))
    with (tmp_path / "demonstrations.jsonl").open("a") as file:
        file.write(demonstration(21).to_json() + "\n")
    with pytest.raises(UsageError, match="built from other data"):
        load_or_build(made, path)
    with pytest.raises(UsageError, match="built from other data"):
        load_or_build(replace(made, template="contrastive"), path)


@pytest.mark.usefixtures("_plain")
def test_nothing_to_train_on_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to train on"):
        build(Recipe(SftConfig(data=SftDataConfig(pairs=0)), tmp_path))
    with pytest.raises(UsageError, match="no demonstration can be trained on: the files are empty"):
        build(recipe(tmp_path, []))
    with pytest.raises(UsageError, match="there are no demonstrations at nowhere"):
        build(Recipe(SftConfig(data=SftDataConfig(pairs=0, demonstrations=("nowhere",))), tmp_path))
    (tmp_path / "other.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"line 1 of .*other\.jsonl is no demonstration"):
        list(read_demonstrations([tmp_path / "other.jsonl"]))
