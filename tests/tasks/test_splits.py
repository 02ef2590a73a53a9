"""Splits follow family, composition and content only, and hold out what they say."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.procedural import FAMILIES, HELD_OUT_FAMILIES, TRAINING_FAMILIES, generate
from tasks.records import Task
from tasks.splits import is_held_out_pair, pairs_of, split_of

COUNT = 300
SPLITS = {
    family: [(task, split_of(task)) for i in range(COUNT) for task in [generate(family, i, "cpu")]]
    for family in FAMILIES
}


def _trained() -> list[Task]:
    return [task for family in TRAINING_FAMILIES for task, split in SPLITS[family] if split == "train"]


@given(family=st.sampled_from(FAMILIES), index=st.integers(0, 10_000), name=st.text(min_size=1), data=st.data())
def test_renaming_and_reordering_never_move_a_task(family: str, index: int, name: str, data: st.DataObject) -> None:
    task = generate(family, index, "cpu")
    order = data.draw(st.permutations(task.composition))
    renamed = Task.model_validate(task.model_dump() | {"id": name, "name": name, "composition": tuple(order)})
    assert split_of(renamed) == split_of(task)


@given(st.integers(0, 10_000))
def test_layout_and_comments_never_move_a_task(index: int) -> None:
    task = generate("row_norm", index, "cpu")
    other = Task.model_validate(task.model_dump() | {"source": "# another comment\n\n" + task.source + "\n\n"})
    assert split_of(other) == split_of(task)


def test_no_training_task_has_a_held_out_pair_and_each_held_out_composition_has_one_never_trained() -> None:
    trained = {pair for task in _trained() for pair in pairs_of(task.composition)}
    assert not any(is_held_out_pair(*pair) for pair in trained)
    for family in TRAINING_FAMILIES:
        for task, split in SPLITS[family]:
            if split == "held_out_composition":
                assert set(pairs_of(task.composition)) - trained


def test_every_sub_skill_of_the_training_families_is_trained() -> None:
    known = {skill for family in TRAINING_FAMILIES for task, _ in SPLITS[family] for skill in task.composition}
    assert known == {skill for task in _trained() for skill in task.composition}


@pytest.mark.parametrize("family", TRAINING_FAMILIES)
def test_each_training_family_has_all_three_splits(family: str) -> None:
    shares = {name: sum(s == name for _, s in SPLITS[family]) / COUNT for name in {s for _, s in SPLITS[family]}}
    assert set(shares) == {"train", "held_out_composition", "held_out_instance"}
    assert shares["train"] > 0.3
    assert shares["held_out_composition"] > 0.05


def test_held_out_families_are_held_out_whole() -> None:
    assert len(HELD_OUT_FAMILIES) >= 2
    assert {split for family in HELD_OUT_FAMILIES for _, split in SPLITS[family]} == {"held_out_family"}


def test_a_pair_is_the_same_in_both_orders() -> None:
    names = sorted({skill for rows in SPLITS.values() for task, _ in rows for skill in task.composition})
    held = [pair for pair in combinations(names, 2) if is_held_out_pair(*pair)]
    assert held
    assert all(is_held_out_pair(b, a) for a, b in held)


def test_tasks_from_elsewhere_are_split_by_content_alone() -> None:
    sources = [f"class Model: pass\nx = {n}\n" for n in range(400)]
    splits = [split_of(Task(id="a", source=source)) for source in sources]
    assert splits == [split_of(Task(id=f"file:{n}", source="#\n" + source)) for n, source in enumerate(sources)]
    assert 20 <= splits.count("held_out_instance") <= 60
    assert set(splits) == {"train", "held_out_instance"}
