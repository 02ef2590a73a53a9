"""Trees of tensors and scalars survive their JSON form, and nothing else does."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluator.worker.tree import TensorSpec, UnsupportedLeaf, flatten, unflatten


class Leaf:
    """Stands for a tensor."""


def is_leaf(value: Any) -> bool:
    return isinstance(value, Leaf)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@given(TREES)
def test_a_tree_survives_its_json_form(value: Any) -> None:
    flat = flatten(value, is_leaf)
    assert unflatten(json.loads(json.dumps(flat.form)), []) == value


def test_nan_and_infinities_survive() -> None:
    flat = flatten([math.nan, math.inf, -0.0], is_leaf)
    nan, infinity, zero = unflatten(json.loads(json.dumps(flat.form)), [])
    assert math.isnan(nan)
    assert infinity == math.inf
    assert math.copysign(1, zero) == -1


def test_paths_and_structure_name_each_tensor() -> None:
    first, second = Leaf(), Leaf()
    flat = flatten((first, {"hidden": [second, 3]}), is_leaf)
    assert flat.paths == ["0", "1.hidden.0"]
    assert flat.tensors == [first, second]
    assert flat.structure == "tuple(tensor,dict(hidden:list(tensor,scalar)))"


def test_a_bare_tensor_has_path_0() -> None:
    assert flatten(Leaf(), is_leaf).paths == ["0"]


def test_subclasses_and_deep_trees_are_refused() -> None:
    class Sly(list):
        pass

    deep: Any = 1
    for _ in range(20):
        deep = [deep]
    for value in (Sly(), deep, object(), {1: 2}):
        with pytest.raises(UnsupportedLeaf):
            flatten(value, is_leaf)


@pytest.mark.parametrize("form", [{"tensor": 5}, {"tensor": -1}, {"eval": "1"}, {"float": 3}, {"a": 1, "b": 2}])
def test_forms_that_flatten_never_makes_are_refused(form: Any) -> None:
    with pytest.raises(ValueError):
        unflatten(form, [])


def test_a_tensor_spec_survives_the_wire_and_nonsense_does_not() -> None:
    spec = TensorSpec("float32", (2, 3), (1, 2), 512)
    assert TensorSpec.from_wire(json.loads(json.dumps(spec.to_wire()))) == spec
    for wrong in (None, [], ["float32", [2], [1, 1], 0], ["float32", [-2], [1], 0], ["float32", [2], [1], -1]):
        with pytest.raises(ValueError):
            TensorSpec.from_wire(wrong)
