"""Brings a store that an older version made up to date, a step for each schema.

Invariants: a step may be interrupted anywhere and done again, also by several at once; the schema is raised only after
its step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from exemplar_store.contents import contents, shelf_items
from exemplar_store.keys import SCHEMA_VERSION, Shelf, exemplar_id
from exemplar_store.store import ExemplarStore
from exemplar_store.stream import RunStream
from tasks.records import Exemplar

log = logging.getLogger(__name__)


def migrate(store: ExemplarStore, schema: int) -> None:
    """Takes a store from an older schema, one of `STEPS`, to this version's."""
    log.warning(
        "The store at %s has schema %d: it is brought to schema %d, which older versions refuse.",
        store.connection.place, schema, SCHEMA_VERSION,
    )  # fmt: skip
    for version in range(schema, SCHEMA_VERSION):
        STEPS[version](store)
        store.connection.script("raise_schema", [store.keys.store("meta")], [version, version + 1])


def _pin_what_reports_show(store: ExemplarStore) -> None:
    """1 to 2: a run pins the best it finds on each shelf. What runs have found so far is told by their events."""
    known, names = contents(store), store.tasks()
    for run_id in known.runs:
        found = _accepted_samples(RunStream(store, run_id))
        for task in store.connection.call("SMEMBERS", store.keys.run(run_id, "tasks")):
            task_hash = task.decode()
            samples = found.get(names.get(task_hash, ""), set())
            for shelf in known.shelves.get(task_hash, {}).get("exemplar", []):
                keys = [*store.shelf_keys(task_hash, shelf), store.keys.task_run(task_hash, "best", run_id)]
                for item in shelf_items(store, task_hash, "exemplar", shelf):
                    if isinstance(item.record, Exemplar) and item.record.origin in samples:
                        store.connection.script("pin_best", keys, _arguments(run_id, shelf, item.record))


def _arguments(run_id: str, shelf: Shelf, exemplar: Exemplar) -> list[str]:
    return [run_id, str(shelf), exemplar_id(exemplar.candidate_hash), repr(exemplar.measurement.ci_low)]


def _accepted_samples(run: RunStream) -> dict[str, set[str]]:
    """Task id -> ids of the run's accepted samples."""
    tasks: dict[str, str] = {}
    found: dict[str, set[str]] = {}
    for event in run.events():
        if event.get("kind") == "group_formed":
            tasks[event["group_id"]] = event["task_id"]
        elif event.get("kind") == "sample_left" and event["outcome"] == "accepted":
            found.setdefault(tasks.get(event["group_id"], ""), set()).add(event["sample_id"])
    return found


STEPS: dict[int, Callable[[ExemplarStore], None]] = {1: _pin_what_reports_show}
"""Schema -> what takes a store to the next."""
