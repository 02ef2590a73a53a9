from __future__ import annotations

import pytest

from rollout.novelty import copy_of, nearest_distance
from tasks.records import Candidate

SOURCE = "class ModelNew:\n    def forward(self, x):\n        return x + 1\n"


def test_a_copy_is_seen_through_comments_and_layout() -> None:
    shown = Candidate(source=SOURCE).content_hash
    disguised = '"""New!"""\nclass ModelNew:\n\n  # better\n  def forward(self, x): return (x + 1)\n'
    assert copy_of(disguised, ["0" * 64, shown]) == shown
    assert copy_of(SOURCE.replace("+ 1", "+ 2"), [shown]) == ""
    assert copy_of(SOURCE, []) == ""


def test_distance_by_hand() -> None:
    """`a = 1` and `a = 2` differ in 1 of 5 characters; `bb = 12` against `a = 1` needs 3 edits of 7."""
    assert nearest_distance("a = 1  # x", ["a = 2"]) == pytest.approx(0.2)
    assert nearest_distance("a = 1", ["bb = 12", "a = 2"]) == pytest.approx(0.2)
    assert nearest_distance("bb = 12", ["a = 1"]) == pytest.approx(3 / 7)
    assert nearest_distance("a = 1", ["a=1"]) == 0
    assert nearest_distance("a = 1", []) is None


def test_huge_sources_are_compared_in_bounded_time() -> None:
    assert nearest_distance("x" * 2_000_000, ["y" * 2_000_000]) == 1
