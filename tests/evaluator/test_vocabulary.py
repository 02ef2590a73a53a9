"""Every word of a record has one sentence, and `docs/labels.md` has every word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from evaluator import review
from evaluator.judgement import Facts, confirm
from evaluator.judgement.labels import LABELS
from tasks.records import evaluation as words

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "labels.md").read_text()
VOCABULARIES = [
    (words.Outcome, words.OUTCOMES),
    (words.Step, words.STEPS),
    (words.RejectionReason, words.REJECTIONS),
    (words.UnscoredReason, words.UNSCORED),
]


@pytest.mark.parametrize(("literal", "meanings"), VOCABULARIES)
def test_every_word_has_a_sentence_on_the_page(literal: object, meanings: dict[str, str]) -> None:
    assert set(meanings) == set(get_args(literal))
    for name, meaning in meanings.items():
        assert re.fullmatch(r"[A-Z].*\.", meaning)
        assert f"| `{name}` | {meaning} |" in PAGE


def test_every_label_is_on_the_page() -> None:
    found = {name: label.meaning for name, label in LABELS.items()} | confirm.LABELS | review.LABELS
    assert {f"reviewed_{verdict}" for verdict in get_args(review.Verdict)} | {review.UNREVIEWED} == set(review.LABELS)
    for name, meaning in found.items():
        assert re.fullmatch(r"[A-Z].*\.", meaning), name
        assert re.search(rf"^\| `{name}` \| [^|]+ \| {re.escape(meaning)} \|$", PAGE, re.MULTILINE), name


def test_every_fact_is_on_the_page() -> None:
    for name in Facts.model_fields:
        assert f"| `{name}` |" in PAGE
    for name in ("screen.hints", "outputs.leaves.dtype", "draws.first.seed", "timers.quiet_log"):
        assert f"| `{name}` |" in PAGE


def test_both_readmes_point_at_the_page() -> None:
    assert "(docs/labels.md)" in (ROOT / "README.md").read_text()
    assert "(../docs/labels.md)" in (ROOT / "evaluator" / "README.md").read_text()
