"""Making room: caps applied to buckets that stand, and pins that protect what a checkpoint or report refers to.

A run pins what its report shows as it records it (owner `run:<id>`); what else refers to an exemplar pins it under its
own name. A checkpoint refers to groups: exemplars in the prompts of groups that it leaves to be replayed stay too.

Invariants: a pinned exemplar is never removed, by whatever caps; a pruned exemplar leaves every index in one script.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from exemplar_store.codec import read
from exemplar_store.config import BucketCaps
from exemplar_store.contents import contents
from exemplar_store.errors import StoreUsageError
from exemplar_store.filed import FiledEvaluation
from exemplar_store.keys import Shelf, exemplar_id
from exemplar_store.store import ExemplarStore
from exemplar_store.stream import RunStream
from tasks.records import Exemplar
from tasks.version import EVALUATOR_VERSION

_OWNER = re.compile(r"^[A-Za-z0-9_.:@/+-]{1,200}$")


def owner_of_run(run_id: str) -> str:
    """The owner of what a run's report shows."""
    return f"run:{run_id}"


def pin(store: ExemplarStore, owner: str, exemplars: Iterable[Exemplar]) -> int:
    """Protects exemplars for as long as `owner` (a checkpoint's or report's name) lasts; how many were new to it.

    Raises StoreUsageError for an exemplar that is not in the store, since it could not be protected.
    """
    _check_owner(owner)
    new = 0
    for exemplar in exemplars:
        shelf, name = Shelf.of(exemplar), exemplar_id(exemplar.candidate_hash)
        answer = store.connection.script("pin", store.place_keys(exemplar), [owner, str(shelf), name])
        if answer == -1:
            raise StoreUsageError(f"exemplar {name} of {exemplar.task_id} is not in the store: insert it first")
        new += answer
    return new


def unpin(store: ExemplarStore, owner: str) -> int:
    """Lets go of everything that `owner` protects; how many exemplars that were."""
    _check_owner(owner)
    pins = [[store.keys.task(task_hash, "pins")] for task_hash in store.tasks()]
    return sum(store.connection.scripts([("unpin", keys, [owner]) for keys in pins]))


def prune(store: ExemplarStore, caps: BucketCaps) -> int:
    """Cuts every bucket to the union of its best, newest and a uniform sample; how many exemplars were removed.

    Raises StoreUsageError when all caps are zero: that would empty the store.
    """
    limits = [caps.best, caps.newest, caps.random]
    if not any(limits):
        raise StoreUsageError("pruning needs at least one cap above zero: say how many of each bucket stay")
    removed = 0
    shown = _shown_to_pending_groups(store)
    for task_hash in store.tasks():
        for shelf, buckets in store.shelves(task_hash).items():
            keys = store.shelf_keys(task_hash, shelf)
            removed += sum(
                store.connection.scripts(
                    [
                        ("prune", keys, [str(shelf), *store.bounds(bucket.index), *limits, *shown.get(task_hash, ())])
                        for bucket in buckets
                        if bucket.count > max(limits)
                    ]
                )
            )
    return removed


def _shown_to_pending_groups(store: ExemplarStore) -> dict[str, set[str]]:
    """Task hash -> ids of exemplars in the prompts of groups that are open or wait for a checkpoint, of every run."""
    shown: dict[str, set[str]] = {}
    for run_id in contents(store).runs:
        for prompt in RunStream(store, run_id).pending_prompts():
            shown.setdefault(prompt.task_hash, set()).update(map(exemplar_id, prompt.exemplar_hashes))
    return shown


def prune_evaluations(store: ExemplarStore) -> int:
    """Removes evaluations by other versions of the evaluator, which the cache never answers with; how many."""
    removed = 0
    for task_hash, kinds in contents(store).shelves.items():
        for shelf in kinds.get("evaluation", []):
            name = store.keys.shelf(task_hash, "evaluations", shelf)
            for field, data in store.connection.call("HGETALL", name).items():
                version = read(FiledEvaluation, data).evaluation.versions.evaluator
                if version != EVALUATOR_VERSION:
                    removed += store.connection.call("HDEL", name, field)
    return removed


def _check_owner(owner: str) -> None:
    if not _OWNER.match(owner):
        raise StoreUsageError(f"{owner!r} cannot own pins: use letters, digits and _ . : @ / + -")
