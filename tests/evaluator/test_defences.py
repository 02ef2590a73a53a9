"""Every defence is documented, named in the table of the package's README, and has an evidence row there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

import evaluator
from evaluator import EvaluatorConfig
from evaluator.judgement.defences import ALL_DEFENCES, DEFENCES
from evaluator.judgement.defences.aliasing import overlapping, self_overlapping
from evaluator.judgement.defences.state_growth import MemoryLog, allowed_bytes
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import MIB, Rules

README = Path(evaluator.__file__).parent / "README.md"
TESTS = Path(__file__).parent


def table() -> dict[str, str]:
    """Defence to its row of the table."""
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \|.*$", README.read_text(), flags=re.MULTILINE)
    lines = {row: next(line for line in README.read_text().splitlines() if f"| `{row}` |" in line) for row in rows}
    return lines


def test_the_readme_lists_exactly_the_defences() -> None:
    assert sorted(table()) == sorted(ALL_DEFENCES)


def test_the_tests_that_the_readme_names_exist() -> None:
    texts = {path.name: path.read_text() for path in TESTS.glob("test_*.py")}
    for row in table().values():
        for name in re.findall(r"`judge:([^`]+)`", row):
            assert f'"{name}"' in texts["test_judge.py"], name
        for name in re.findall(r"`(test_\w+)`", row):
            assert any(f"def {name}(" in text for text in texts.values()), name
        for name in re.findall(r"`(test_\w+\.py)`", row):
            assert name in texts, name


def test_every_defence_rests_on_facts_that_exist_and_is_documented() -> None:
    for name, defence in DEFENCES.items():
        module = importlib.import_module(f"evaluator.judgement.defences.{name}")
        assert module.DEFENCE is defence
        assert len((module.__doc__ or "").split()) > 20
        assert set(defence.facts) <= set(Facts.model_fields)
        assert all(field in (module.__doc__ or "") for field in defence.facts), name


def test_ranges_that_touch_do_not_overlap() -> None:
    assert overlapping((0, 10), (9, 12))
    assert not overlapping((0, 10), (10, 12))
    assert not overlapping((5, 5), (0, 10))


def test_strides_that_fold_a_tensor_onto_itself() -> None:
    for shape, stride in [
        ((4, 3), (0, 1)),
        ((4, 3), (1, 1)),
        ((2, 2), (1, 0)),
        ((5, 4), (2, 1)),
        ((2, 3, 4), (12, 2, 1)),
    ]:
        assert self_overlapping(shape, stride), (shape, stride)
    dense = [((4, 3), (3, 1)), ((4, 3), (1, 4)), ((1, 3), (0, 1)), ((2, 3, 4), (12, 4, 1)), ((2, 3, 4), (1, 8, 2)),
             ((4, 3), (8, 1)), ((), ()), ((0, 3), (0, 0))]  # fmt: skip
    for shape, stride in dense:
        assert not self_overlapping(shape, stride), (shape, stride)


def test_growth_is_allowed_by_the_larger_bound() -> None:
    rules = Rules()
    assert allowed_bytes(1 * MIB, rules) == 256 * MIB
    assert allowed_bytes(100 * MIB, rules) == 400 * MIB


def test_the_memory_log_tells_a_hoard_from_a_reserve() -> None:
    """A reserve of 384 MiB fills over twelve calls; a hoard adds 20 MiB a call."""
    reserve, hoard = MemoryLog(), MemoryLog()
    for number in range(20):
        reserve.add((100 + min(32 * number, 384)) * MIB, 2)
        hoard.add((100 + 40 * number) * MIB, 2)
    assert (reserve.grown_bytes, reserve.calls, reserve.still_growing) == (384 * MIB, 38, False)
    assert (hoard.grown_bytes, hoard.calls, hoard.still_growing) == (760 * MIB, 38, True)


def test_the_memory_log_begins_after_the_first_call() -> None:
    log = MemoryLog()
    assert (log.grown_bytes, log.calls, log.still_growing) == (0, 0, True)
    log.add(900 * MIB, 1)
    assert (log.grown_bytes, log.calls) == (0, 0)


def test_only_defences_that_exist_can_be_turned_off() -> None:
    assert EvaluatorConfig(defences_off=("nan_masks",)).defences_off == ("nan_masks",)
    with pytest.raises(ValidationError, match="no defence nan_mask;"):
        EvaluatorConfig(defences_off=("nan_mask",))
