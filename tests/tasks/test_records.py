"""Records: stable bytes, strict fields, content hashes that ignore what does not matter."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.records import Candidate, Evaluation, Measurement, PolicyVersion, Task
from tasks.records.base import digest, stable_json
from tasks.records.source import normalised_source

SOURCE = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n"


def measurement(**changes: object) -> Measurement:
    values = {"speedup": 2.0, "ci_low": 1.9, "ci_high": 2.1, "reference_ms": 2.0, "candidate_ms": 1.0, "pairs": 20}
    return Measurement(**{**values, **changes})


def test_json_round_trip_is_stable() -> None:
    task = Task(id="file:x", source=SOURCE)
    assert Task.from_json(task.to_json()) == task
    assert Task.from_json(task.to_json()).to_json() == task.to_json()


def test_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError):
        Task.model_validate({"id": "a", "source": "b", "speed": 1})


def test_every_record_carries_the_versions() -> None:
    versions = Task(id="a", source="b").model_dump()["versions"]
    assert set(versions) == {"package", "evaluator", "record_schema"}


def test_task_hash_covers_precision_and_mode_but_not_the_id() -> None:
    task = Task(id="a", source=SOURCE)
    assert Task(id="b", source="# note\n" + SOURCE).content_hash == task.content_hash
    assert Task(id="a", source=SOURCE, precision="bf16").content_hash != task.content_hash
    assert Task(id="a", source=SOURCE, mode="eval").content_hash != task.content_hash


def test_candidate_hash_ignores_comments_layout_and_docstrings() -> None:
    spaced = (
        SOURCE.replace("import ", "import   ").replace("x + 1", "x+1").replace("    def", '    """Doc."""\n    def')
    )
    assert Candidate(source=spaced).content_hash == Candidate(source=SOURCE).content_hash


@pytest.mark.parametrize("source", ["def f(:", "\x00", "x" * 10 + "\n  y", "(" * 5000])
def test_any_text_has_a_normal_form(source: str) -> None:
    assert Candidate(source=source).content_hash == Candidate(source=source + "\n").content_hash


@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4))
def test_digest_separates_parts(a: list[str], b: list[str]) -> None:
    assert (digest(*a) == digest(*b)) == (a == b)


def test_normal_form_is_idempotent() -> None:
    once = normalised_source(SOURCE)
    assert normalised_source(once) == once


def test_nan_never_enters_a_record() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        stable_json({"speedup": math.nan})


def test_outcome_and_reason_must_agree() -> None:
    base = {"step": "time", "task_id": "a", "task_hash": "b", "candidate_hash": "c"}
    Evaluation(outcome="accepted", measurement=measurement(), **base)
    Evaluation(outcome="rejected", reason="incorrect", **base)
    Evaluation(outcome="unscored", reason="device_fault", **base)
    for bad in (
        {"outcome": "accepted"},
        {"outcome": "accepted", "measurement": measurement(), "reason": "incorrect"},
        {"outcome": "rejected", "reason": "device_fault"},
        {"outcome": "rejected"},
        {"outcome": "unscored", "reason": "incorrect"},
    ):
        with pytest.raises(ValidationError):
            Evaluation(**bad, **base)


def test_policy_versions_order_by_epoch_then_step() -> None:
    assert PolicyVersion(epoch=0, step=9) < PolicyVersion(epoch=1, step=0) < PolicyVersion(epoch=1, step=1)
    assert str(PolicyVersion(epoch=1, step=2)) == "1.2"
