"""Recounts every index of a store against its records.

Invariant: reads only. A store that is being written to is read again where it moved meanwhile, so that a difference is
a defect and not a moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import ValidationError

from exemplar_store.codec import unpack
from exemplar_store.contents import contents
from exemplar_store.errors import StoreError
from exemplar_store.filed import CacheKey, Claim, FiledEvaluation
from exemplar_store.keys import Shelf, exemplar_id
from exemplar_store.store import ExemplarStore, read_entry
from tasks.records import Candidate

_ATTEMPTS = 3
_PAGE = 256


@dataclass
class Verdict:
    """What was counted and what differs."""

    tasks: int = 0
    exemplars: int = 0
    evaluations: int = 0
    claims: int = 0
    groups: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def consistent(self) -> bool:
        """True when nothing differs."""
        return not self.problems

    def summary(self) -> str:
        """One line with the counts and the outcome."""
        counted = (
            f"{self.tasks} tasks, {self.exemplars} exemplars, {self.evaluations} evaluations, {self.claims} claims, "
            f"{self.groups} groups"
        )
        return f"{counted}: {'consistent' if self.consistent else f'{len(self.problems)} differences'}"


def verify(store: ExemplarStore, *, sources: bool = False) -> Verdict:
    """Recounts everything; with `sources` also hashes every source anew, which takes about 0.3 ms each."""
    verdict = Verdict()
    known = contents(store)
    listed = store.tasks()
    for task_hash, kinds in known.shelves.items():
        verdict.tasks += 1
        if task_hash not in listed:
            verdict.problems.append(f"task {task_hash} has records but is not listed")
        _exemplars(store, task_hash, [*kinds.get("exemplar", []), *known.scores.get(task_hash, [])], verdict, sources)
        for shelf in kinds.get("evaluation", []):
            _evaluations(store, task_hash, shelf, verdict)
        for shelf in kinds.get("claim", []):
            _claims(store, task_hash, shelf, verdict)
    for run_id in known.runs:
        _run(store, run_id, verdict)
    return verdict


def _exemplars(store: ExemplarStore, task_hash: str, known: list[Shelf], verdict: Verdict, sources: bool) -> None:
    """One task's exemplars against its scores and bucket counts, from one moment."""
    stats_key = store.keys.task(task_hash, "stats")
    for attempt in range(_ATTEMPTS):
        stats = store.connection.call("HGETALL", stats_key)
        counted, problems = 0, []
        shelves = {Shelf.parse(field.decode().rsplit("|", 2)[0]) for field in stats if field != b"seq"}
        for shelf in sorted(shelves.union(known)):
            count, found = _shelf(store, task_hash, shelf, stats, sources=sources)
            counted += count
            problems += found
        moved = store.connection.call("HGETALL", stats_key) != stats
        if not moved or attempt == _ATTEMPTS - 1:
            break
    verdict.exemplars += counted
    verdict.problems += problems


def _shelf(
    store: ExemplarStore, task_hash: str, shelf: Shelf, stats: dict[bytes, bytes], *, sources: bool
) -> tuple[int, list[str]]:
    where = f"task {task_hash[:12]} on {shelf}"
    problems: list[str] = []
    names = [store.keys.shelf(task_hash, name, shelf) for name in ("exemplars", "scores")]
    flat = store.connection.call("ZRANGE", names[1], 0, -1, "WITHSCORES")
    scores = {flat[at]: float(flat[at + 1]) for at in range(0, len(flat), 2)}
    ids = sorted(store.connection.call("HKEYS", names[0]))
    for lonely in sorted(set(scores) ^ set(ids)):
        lacks = "a score but no record" if lonely in scores else "a record but no score"
        problems.append(f"{where}: exemplar {lonely.decode()} has {lacks}")
    counts: dict[int, list[int]] = {}
    for at in range(0, len(ids), _PAGE):
        page = ids[at : at + _PAGE]
        for id, entry in zip(page, store.connection.call("HMGET", names[0], *page), strict=True):
            if entry is not None:
                bucket, micro, problem = _entry(store, shelf, id.decode(), entry, scores.get(id), sources=sources)
                if problem:
                    problems.append(f"{where}: exemplar {id.decode()} {problem}")
                total = counts.setdefault(bucket, [0, 0])
                total[0] += 1
                total[1] += micro
    stand = {
        int(name.decode().split("|")[-2]): [int(value), int(stats.get(name[:-1] + b"s", b"0"))]
        for name, value in stats.items()
        if name.startswith(f"{shelf}|".encode()) and name.endswith(b"|n")
    }
    for bucket in sorted(stand.keys() | counts.keys()):
        is_, should = stand.get(bucket, [0, 0]), counts.get(bucket, [0, 0])
        if is_ != should:
            problems.append(
                f"{where}: bucket {bucket} counts {is_[0]} exemplars with sum {is_[1]}, the records give {should[0]} "
                f"with {should[1]}"
            )
    return len(ids), problems


def _entry(
    store: ExemplarStore, shelf: Shelf, id: str, entry: bytes, score: float | None, *, sources: bool
) -> tuple[int, int, str]:
    """Bucket and micro-score as the entry has them, and what is wrong with it."""
    try:
        _, bucket, micro, _ = entry.split(b"|", 3)
        exemplar = read_entry(entry)
    except (ValueError, StoreError, ValidationError) as error:
        return 0, 0, f"cannot be read: {type(error).__name__}"
    wrong = ""
    if exemplar_id(exemplar.candidate_hash) != id or Shelf.of(exemplar) != shelf:
        wrong = "is filed under another name than its record's"
    elif score is not None and score != exemplar.speedup:
        wrong = f"has score {score} and speedup {exemplar.speedup}"
    elif int(bucket) != store.bucketing.index(exemplar.speedup) or int(micro) != store.bucketing.micro_score(
        exemplar.speedup
    ):
        wrong = f"is filed in bucket {int(bucket)}, its speedup {exemplar.speedup} belongs elsewhere"
    elif sources and Candidate(source=exemplar.source).content_hash != exemplar.candidate_hash:
        wrong = "has a source that does not give its hash"
    return int(bucket), int(micro), wrong


def _evaluations(store: ExemplarStore, task_hash: str, shelf: Shelf, verdict: Verdict) -> None:
    for name, data in _pages(store, store.keys.shelf(task_hash, "evaluations", shelf)):
        verdict.evaluations += 1
        try:
            key = CacheKey.of(FiledEvaluation.from_json(unpack(data)).evaluation)
        except (ValueError, StoreError) as error:
            verdict.problems.append(f"task {task_hash[:12]} on {shelf}: evaluation {name} cannot be read: {error}")
            continue
        if (key.field, key.shelf, key.task_hash) != (name, shelf, task_hash):
            verdict.problems.append(f"task {task_hash[:12]} on {shelf}: evaluation {name} is of something else")


def _claims(store: ExemplarStore, task_hash: str, shelf: Shelf, verdict: Verdict) -> None:
    for name, data in _pages(store, store.keys.shelf(task_hash, "claims", shelf)):
        verdict.claims += 1
        try:
            claim = Claim.from_json(unpack(data))
        except (ValueError, StoreError) as error:
            verdict.problems.append(f"task {task_hash[:12]}: claim {name} cannot be read: {error}")
            continue
        if (exemplar_id(claim.candidate_hash), claim.shelf) != (name, shelf):
            verdict.problems.append(f"task {task_hash[:12]}: claim {name} is of something else")


def _run(store: ExemplarStore, run_id: str, verdict: Verdict) -> None:
    """Open groups have as many samples as they count, and no ledger more than were dispatched."""
    call, keys = store.connection.call, store.keys
    open_groups = call("HGETALL", keys.run(run_id, "open"))
    for group, task in sorted(open_groups.items()):
        state = call("HGETALL", keys.group(task.decode(), run_id, group.decode()))
        if not state:  # relayed a moment ago, or announced and never opened
            continue
        verdict.groups += 1
        samples, left = sum(name.startswith(b"s:") for name in state), int(state[b"left"])
        if samples != left:
            verdict.problems.append(f"run {run_id}: group {group.decode()} counts {left} samples and holds {samples}")
        waiting = call("SISMEMBER", keys.task_run(task.decode(), "outbox", run_id), group)
        if waiting and left != int(state[b"size"]):
            verdict.problems.append(f"run {run_id}: group {group.decode()} waits in the outbox and is not complete")
    for task in sorted(call("SMEMBERS", keys.run(run_id, "tasks"))):
        ledger = call("HGETALL", keys.task_run(task.decode(), "ledger", run_id))
        gone = sum(int(count) for name, count in ledger.items() if name != b"dispatched")
        if gone > int(ledger.get(b"dispatched", 0)):
            verdict.problems.append(
                f"run {run_id}: {gone} samples left task {task.decode()[:12]}, more than were dispatched"
            )


def _pages(store: ExemplarStore, key: str) -> Iterator[tuple[str, bytes]]:
    names = sorted(store.connection.call("HKEYS", key))
    for at in range(0, len(names), _PAGE):
        page = names[at : at + _PAGE]
        for name, data in zip(page, store.connection.call("HMGET", key, *page), strict=True):
            if data is not None:
                yield name.decode(), data
