"""What is in a store, in one fixed order: for export, verification, pruning and counts.

Invariants: everything is read in pages, so that a store of any size fits through; the order depends on the content
alone (task hash, then kind, then shelf, then id), never on how it came in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from exemplar_store.codec import read
from exemplar_store.filed import Claim, FiledEvaluation
from exemplar_store.keys import Shelf
from exemplar_store.store import ExemplarStore, read_entry
from tasks.records import Exemplar, Task

Kind = Literal["task", "exemplar", "evaluation", "claim"]
KINDS: tuple[Kind, ...] = ("task", "exemplar", "evaluation", "claim")
"""In the order in which one task's records come."""
_HASHES: dict[str, Kind] = {"exemplars": "exemplar", "evaluations": "evaluation", "claims": "claim"}
_PAGE = 256


class Place(NamedTuple):
    """Where a record stands in the order of all; places compare as the records come."""

    task_hash: str
    kind_rank: int
    shelf: str
    id: str


class Item(NamedTuple):
    """One record and its place."""

    place: Place
    kind: Kind
    record: Task | Exemplar | FiledEvaluation | Claim


@dataclass
class Contents:
    """Which shelves of which tasks hold records of each kind."""

    shelves: dict[str, dict[Kind, list[Shelf]]] = field(default_factory=dict)
    """Task hash -> kind -> shelves, sorted."""
    scores: dict[str, list[Shelf]] = field(default_factory=dict)
    """Task hash -> shelves with an order of speedups; the same as those with exemplars, unless something is wrong."""
    runs: list[str] = field(default_factory=list)


def contents(store: ExemplarStore) -> Contents:
    """Finds all shelves and runs by one pass over the key names."""
    found = Contents({task_hash: {} for task_hash in sorted(store.tasks())})
    runs: set[str] = set()
    shelves: set[tuple[str, Kind, str]] = set()
    for key in store.connection.scan(f"{store.config.namespace}:*"):
        tag, _, name = key.removeprefix(f"{store.config.namespace}:{{").partition("}:")
        if tag.startswith("run:"):
            runs.add(tag.removeprefix("run:"))
            continue
        hash_name, _, shelf = name.partition(":")
        if hash_name == "scores":
            found.scores.setdefault(tag, []).append(Shelf.parse(shelf))
        elif hash_name in _HASHES:
            shelves.add((tag, _HASHES[hash_name], shelf))
    for task_hash, kind, shelf in sorted(shelves):
        found.shelves.setdefault(task_hash, {}).setdefault(kind, []).append(Shelf.parse(shelf))
    found.shelves = dict(sorted(found.shelves.items()))
    found.runs = sorted(runs)
    return found


def items(store: ExemplarStore, *, after: Place | None = None) -> Iterator[Item]:
    """Every task, exemplar, evaluation and claim in order, after a place if one is given."""
    known = contents(store)
    for task_hash, kinds in known.shelves.items():
        if after is not None and task_hash < after.task_hash:
            continue
        place = Place(task_hash, 0, "", "")
        if after is None or place > after:
            task = store.task(task_hash)
            if task is not None:
                yield Item(place, "task", task)
        for rank, kind in enumerate(KINDS):
            for shelf in kinds.get(kind, []):
                yield from shelf_items(store, task_hash, kind, shelf, after=after, rank=rank)


def shelf_items(
    store: ExemplarStore, task_hash: str, kind: Kind, shelf: Shelf, *, after: Place | None = None, rank: int = 0
) -> Iterator[Item]:
    """The records of one kind on one shelf, by id."""
    name = store.keys.shelf(task_hash, f"{kind}s", shelf)
    places = [Place(task_hash, rank, str(shelf), id.decode()) for id in store.connection.call("HKEYS", name)]
    places = sorted(place for place in places if after is None or place > after)
    for at in range(0, len(places), _PAGE):
        page = places[at : at + _PAGE]
        for place, data in zip(page, store.connection.call("HMGET", name, *(p.id for p in page)), strict=True):
            if data is not None:  # else it was removed since its name was read
                yield Item(place, kind, _read(kind, data))


def _read(kind: Kind, data: bytes) -> Exemplar | FiledEvaluation | Claim:
    if kind == "exemplar":
        return read_entry(data)
    return read(FiledEvaluation, data) if kind == "evaluation" else read(Claim, data)


@dataclass
class Stats:
    """Counts of a store."""

    tasks: int = 0
    exemplars: dict[str, int] = field(default_factory=dict)
    """By shelf."""
    buckets: int = 0
    evaluations: int = 0
    claims: int = 0
    hacking_cases: int = 0
    runs: list[str] = field(default_factory=list)
    memory_bytes: int | None = None
    """What the server has allocated, for all it holds; None for a cluster."""


def stats(store: ExemplarStore) -> Stats:
    """Counts everything without reading a record."""
    known = contents(store)
    result = Stats(tasks=len(known.shelves), runs=known.runs)
    for task_hash, kinds in known.shelves.items():
        for shelf, buckets in store.shelves(task_hash).items():
            count = sum(bucket.count for bucket in buckets)
            result.exemplars[str(shelf)] = result.exemplars.get(str(shelf), 0) + count
            result.buckets += len(buckets)
        result.evaluations += _lengths(store, task_hash, "evaluations", kinds.get("evaluation", []))
        result.claims += _lengths(store, task_hash, "claims", kinds.get("claim", []))
    result.hacking_cases = store.connection.call("HLEN", store.keys.store("hacking"))
    used = store.connection.call("INFO", "memory").get("used_memory")
    result.memory_bytes = None if used is None else int(used)
    return result


def _lengths(store: ExemplarStore, task_hash: str, name: str, shelves: Sequence[Shelf]) -> int:
    return sum(store.connection.calls([("HLEN", store.keys.shelf(task_hash, name, shelf)) for shelf in shelves]))
