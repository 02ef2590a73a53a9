"""Controls: kept once, by device type and protocol, the newest only, and only this evaluator's."""

from __future__ import annotations

from typing import Any

import pytest

from exemplar_store import ExemplarStore
from exemplar_store import controls as module
from exemplar_store.controls import Controls
from exemplar_store.errors import StoreUsageError
from tasks.records import Evaluation
from tasks.records.base import Versions


def control(number: int, **more: Any) -> Evaluation:
    return Evaluation(
        outcome="unscored", reason="device_fault", step="time", task_id="t", task_hash="h", candidate_hash="c",
        detail={"seed": number}, **more,
    )  # fmt: skip


def numbers(found: list[Evaluation]) -> list[int]:
    return [one.detail["seed"] for one in found]


def test_controls_come_back_in_the_order_of_their_times_each_once(store: ExemplarStore) -> None:
    controls = Controls(store)
    for number in (3, 1, 2, 2):
        controls.add(control(number), 1e9 + number)
    assert numbers(controls.newest("cpu", "sequential")) == [1, 2, 3]
    assert numbers(controls.newest("cpu", "sequential", 2)) == [2, 3]


def test_device_types_and_protocols_are_apart(store: ExemplarStore) -> None:
    controls = Controls(store)
    controls.add(control(1, device_type="H100"), 1.0)
    controls.add(control(2, protocol="reward"), 2.0)
    assert numbers(controls.newest("H100", "sequential")) == [1]
    assert numbers(controls.newest("cpu", "reward")) == [2]
    assert controls.newest("cpu", "sequential") == []
    with pytest.raises(StoreUsageError):
        controls.newest("H 100", "sequential")


def test_the_oldest_make_room(store: ExemplarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 3)
    controls = Controls(store)
    for number in range(5):
        controls.add(control(number), float(number))
    assert numbers(controls.newest("cpu", "sequential", 100)) == [2, 3, 4]


def test_another_version_of_the_evaluator_does_not_count(store: ExemplarStore) -> None:
    controls = Controls(store)
    controls.add(control(1, versions=Versions(evaluator="0")), 1.0)
    controls.add(control(2), 2.0)
    assert numbers(controls.newest("cpu", "sequential")) == [2]
