"""A store that an older version made: brought up to date, whatever interrupts that."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from exemplar_store import ExemplarStore, RunStream
from exemplar_store import migrations as module
from exemplar_store.config import BucketCaps
from exemplar_store.keys import SCHEMA_VERSION
from exemplar_store.pruning import prune
from exemplar_store.transfer import export_lines
from exemplar_store.verify import verify

TASK = "a" * 64
LOW = [1.51, 1.55, 1.53, 1.52]
"""Speedups of four samples of one bucket; the second is what the run's report shows."""


@pytest.fixture
def schema_1(
    store: ExemplarStore, make_exemplar: Callable, make_prompt: Callable, make_scored: Callable, exemplar_of: Callable
) -> ExemplarStore:
    """As schema 1 had it: no pins by runs. Four samples of a run, a faster seed, and four events."""
    store.insert(make_exemplar(1, 1.59))
    run = RunStream(store, "run")
    run.open_group(make_prompt("p"), 4)
    run.append({"kind": "group_formed", "group_id": "p", "task_id": "procedural:row_norm/1", "device_type": "cpu"})
    for index, speedup in enumerate(LOW):
        scored = make_scored("p", index, speedup=speedup)
        run.record(scored, exemplar_of(scored))
        run.append({"kind": "sample_left", "group_id": "p", "sample_id": f"p/{index}", "outcome": "accepted"})
    store.connection.call("DEL", store.keys.task(TASK, "pins"), store.keys.task_run(TASK, "best", "run"))
    store.connection.call("HSET", store.keys.store("meta"), "schema", 1)
    return store


def schema(store: ExemplarStore) -> int:
    return int(store.connection.call("HGET", store.keys.store("meta"), "schema"))


def test_schema_1_gets_the_pins_of_its_reports(
    schema_1: ExemplarStore, open_store: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    before = list(export_lines(schema_1))
    with caplog.at_level(logging.WARNING):
        store = open_store()
    assert f"has schema 1: it is brought to schema {SCHEMA_VERSION}" in caplog.text
    assert schema(store) == SCHEMA_VERSION
    assert list(export_lines(store)) == before
    assert verify(store).problems == []
    assert prune(store, BucketCaps(best=1)) >= 1
    assert [exemplar.speedup for exemplar in store.top(TASK, "cpu", 2)] == [1.59, 1.55]
    assert prune(store, BucketCaps(best=1)) == 0


def test_an_interrupted_migration_is_done_again(
    schema_1: ExemplarStore, open_store: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step ends half way and the store stays of schema 1; opening again finishes it."""

    def interrupted(run_id: str, shelf: object, exemplar: object) -> list[str]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_arguments", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_store()
    assert schema(schema_1) == 1
    assert schema(open_store()) == SCHEMA_VERSION
    pins = schema_1.connection.call("HKEYS", schema_1.keys.task(TASK, "pins"))
    assert any(name.startswith(b"run:run|") for name in pins)


def test_there_is_a_step_from_every_older_schema() -> None:
    assert sorted(module.STEPS) == list(range(1, SCHEMA_VERSION))
