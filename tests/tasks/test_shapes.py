"""Other shapes of a task: which constants a row may set, what stays as it was, and what is refused."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tasks.errors import UsageError
from tasks.records import Evaluation, Measurement, Sweep, Task
from tasks.reference_source import task_from_source
from tasks.shapes import constants, reshaped, shape_words

SOURCE = """\
import torch
ünïcode = "é"; batch_size = 64  # rows
dim: int = 2 * 128
M, N = 3, 4
kernel = (3,
          3)
sizes = [1, 2]
eps = 1e-5
bias = True
half = dim // 2
other = None
twice = 1
if bias:
    twice = 2
scale = torch.tensor(1.0)
first = second = 5


class Model(torch.nn.Module):
    inner = 7

    def forward(self, x):
        local = 8
        return x


def get_inputs():
    return [torch.randn(batch_size, dim)]


def get_init_inputs():
    return []
"""


@pytest.fixture
def task() -> Task:
    return task_from_source(SOURCE)


def _values(task: Task) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(task.source, "task", "exec"), namespace)
    return namespace


def test_what_a_module_assigns_once_from_plain_values_is_a_constant() -> None:
    assert list(constants(SOURCE)) == [
        "ünïcode", "batch_size", "dim", "M", "N", "kernel", "sizes", "eps", "bias", "half", "other"
    ]  # fmt: skip


def test_a_row_sets_values_and_nothing_else(task: Task) -> None:
    shape = {
        "batch_size": -2, "dim": 1024, "N": 9, "kernel": [5, 7], "sizes": [4], "eps": 1, "bias": False, "ünïcode": "x'",
        "other": [1, [2]],
    }  # fmt: skip
    found = _values(reshaped(task, shape))
    assert {name: found[name] for name in shape} == {**shape, "kernel": (5, 7), "other": (1, (2,))}
    assert (found["M"], found["half"], found["first"]) == (3, 512, 5)


def test_comments_and_line_numbers_stay(task: Task) -> None:
    lines = reshaped(task, {"batch_size": 100000}).source.splitlines()
    assert lines[1] == 'ünïcode = "é"; batch_size = 100000  # rows'
    assert len(lines) == len(SOURCE.splitlines())


def test_a_shape_is_a_task_of_its_own(task: Task) -> None:
    other = reshaped(task, {"dim": 512})
    assert other.content_hash != task.content_hash
    assert other.id == f"{task.id}[dim=512]"
    named = Task(**{**task.model_dump(), "id": "kernelbench:1/1", "suite": "kernelbench"})
    assert reshaped(named, {"dim": 512}).id == "kernelbench:1/1[dim=512]"
    assert reshaped(task, {}) == task
    assert ast.parse(other.source)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ({"batchsize": 1}, "did you mean batch_size?"),
        ({"zzz": 1}, "it has ünïcode, batch_size, dim"),
        ({"twice": 1}, "no constant 'twice'"),
        ({"scale": 1}, "no constant 'scale'"),
        ({"first": 1}, "no constant 'first'"),
        ({"inner": 1}, "no constant 'inner'"),
        ({"local": 1}, "no constant 'local'"),
        ({"batch_size": "16"}, 'batch_size is a whole number in the task, not "16"'),
        ({"batch_size": 1.5}, "a whole number"),
        ({"batch_size": True}, "a whole number"),
        ({"batch_size": [1]}, "a whole number"),
        ({"batch_size": None}, "a whole number"),
        ({"dim": "x"}, "a number"),
        ({"eps": "x"}, "a number"),
        ({"bias": 1}, "true or false"),
        ({"kernel": 3}, "a list"),
        ({"ünïcode": 3}, "a text"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_in_one_sentence(task: Task, shape: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        reshaped(task, shape)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_task_without_constants_says_how_to_get_them(task: Task) -> None:
    bare = task_from_source("class Model: pass\ndef get_inputs(): return []\ndef get_init_inputs(): return []\n")
    with pytest.raises(UsageError, match="such as batch_size = 16"):
        reshaped(bare, {"dim": 1})


def test_a_shape_in_words() -> None:
    assert shape_words({"batch_size": 16, "kernel": [3, 3]}) == "batch_size=16 kernel=[3, 3]"
    assert shape_words({}) == "as written"


def _evaluation(outcome: str, speedup: float = 1.0, **shape: int) -> Evaluation:
    common: dict[str, Any] = {"step": "time", "task_id": "t", "task_hash": "0", "candidate_hash": "0", "shape": shape}
    if outcome == "accepted":
        measured = Measurement(
            speedup=speedup, ci_low=speedup, ci_high=speedup, reference_ms=1.0, candidate_ms=1.0, pairs=1
        )
        return Evaluation(outcome="accepted", measurement=measured, **common)
    reason = "incorrect" if outcome == "rejected" else "device_fault"
    return Evaluation(outcome=outcome, reason=reason, **common)


def test_a_sweep_has_the_mean_the_worst_and_the_worst_outcome() -> None:
    """Speedups 2 and 8: the geometric mean is 4; a shape that was not accepted counts in neither."""
    rows = [_evaluation("accepted", 8.0, n=1), _evaluation("accepted", 2.0, n=2)]
    sweep = Sweep.of(rows)
    assert (sweep.outcome, sweep.accepted, sweep.worst, sweep.worst_shape) == ("accepted", 2, 2.0, {"n": 2})
    assert sweep.geometric_mean == pytest.approx(4.0)
    assert Sweep.from_json(sweep.to_json()) == sweep
    mixed = Sweep.of([*rows, _evaluation("rejected", n=3), _evaluation("unscored", n=4)])
    assert (mixed.outcome, mixed.accepted, mixed.geometric_mean) == ("rejected", 2, sweep.geometric_mean)
    assert Sweep.of([*rows, _evaluation("unscored")]).outcome == "unscored"
    assert Sweep.of([_evaluation("rejected")]).geometric_mean is None


def test_an_evaluation_of_before_shapes_still_loads() -> None:
    old = (
        '{"outcome":"rejected","reason":"incorrect","step":"check","task_id":"t","task_hash":"0","candidate_hash":"0"}'
    )
    assert Evaluation.from_json(old).shape == {}
