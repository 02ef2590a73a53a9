"""Overrides, nearest keys, TOML out and in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from deploy.resolve import ConfigError, merge, parse_overrides, read_tree, to_toml, validate, walk
from tasks.config import Section


class Inner(Section):
    """A part."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature."""
    stage: Literal[0, 1, 2] = 1
    """A number out of three."""
    names: tuple[str, ...] = ("a",)
    """Some names."""
    copy_: float | None = Field(default=None, alias="copy")
    """A key whose Python name differs."""


class Outer(Section):
    """A tree."""

    rollout: Inner = Inner()
    pool: dict[str, int] = {}
    """Counts by GPU type."""
    title: str = ""
    """Any text."""


def resolve(*arguments: str) -> Outer:
    return validate(Outer, parse_overrides(arguments, Outer), "test")


def test_overrides_take_the_fields_type() -> None:
    config = resolve(
        "--rollout.temperature", "0.5", "--rollout.stage=2", "--rollout.names", "x, y", "--pool.H100", "6",
        "--rollout.copy", "0.25",
    )  # fmt: skip
    assert config.rollout == Inner(temperature=0.5, stage=2, names=("x", "y"), copy=0.25)
    assert config.pool == {"H100": 6}


def test_a_number_for_a_text_stays_text() -> None:
    tree = parse_overrides(["--rollout.names", '["3"]'], Outer)
    assert validate(Outer, tree, "test").rollout.names == ("3",)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rollout.temperatur", "1"], "unknown key rollout.temperatur (did you mean rollout.temperature?)"),
        (["--sampling.temperature", "1"], "unknown key sampling (the sections are rollout)"),
        (["--rollout.temperature", "-1"], "rollout.temperature = -1: input should be greater than 0"),
        (["--rollout.temperature"], "--rollout.temperature needs a value"),
        (["rollout.temperature", "1"], "Unexpected argument rollout.temperature"),
    ],
)
def test_errors_name_the_key(arguments: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(*arguments)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_typo_in_a_file_names_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"unknown key rollout.tempreature \(did you mean rollout.temperature\?\)"):
        validate(Outer, {"rollout": {"tempreature": 1.0}}, "my.toml")
    with pytest.raises(ConfigError, match=r"unknown key temperature \(did you mean rollout.temperature\?\)"):
        validate(Outer, {"temperature": 1.0}, "my.toml")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory.*presets are"):
        read_tree(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_tree(str(tmp_path / "bad.toml"))


def test_merge_replaces_values_and_joins_tables() -> None:
    assert merge({"a": {"b": 1, "c": [1, 2]}}, {"a": {"c": [3]}, "d": 4}) == {"a": {"b": 1, "c": [3]}, "d": 4}


def test_walk_uses_the_written_name() -> None:
    assert [name for name, _ in walk(Outer)] == [
        "rollout.temperature", "rollout.stage", "rollout.names", "rollout.copy", "pool", "title",
    ]  # fmt: skip


VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
TREES = st.recursive(
    st.dictionaries(st.text(max_size=6), VALUES, max_size=3),
    lambda inner: st.dictionaries(st.text(max_size=6), st.one_of(VALUES, inner), max_size=3),
    max_leaves=6,
)


@given(TREES)
def test_written_toml_reads_back(tree: dict[str, Any]) -> None:
    import tomllib

    assert tomllib.loads(to_toml(tree)) == tree
