"""Recounts every index of a store against its records.

Invariant: reads only. The indexes of a shelf are read in one script, so that a difference is a defect and not a moment
of a store that is being written to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from exemplar_store.codec import read
from exemplar_store.contents import contents
from exemplar_store.errors import StoreError
from exemplar_store.filed import CacheKey, Claim, FiledEvaluation
from exemplar_store.islands import ARRIVALS
from exemplar_store.keys import Shelf, exemplar_id
from exemplar_store.store import ExemplarStore, read_entry
from tasks.records import Candidate

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


def verify(store: ExemplarStore, *, sources: bool = False, progress: Callable[[int], None] | None = None) -> Verdict:
    """Recounts everything; with `sources` also hashes every source anew, which takes about 0.3 ms each.

    `progress` is called after each shelf with the number of exemplars read so far.
    """
    verdict = Verdict()
    known = contents(store)
    listed = store.tasks()
    for task_hash, kinds in known.shelves.items():
        verdict.tasks += 1
        if task_hash not in listed:
            verdict.problems.append(f"task {task_hash} has records but is not listed")
        counted = store.connection.call("HKEYS", store.keys.task(task_hash, "stats"))
        shelves = {Shelf.parse(field.decode().rsplit("|", 2)[0]) for field in counted if field != b"seq"}
        shelves.update(kinds.get("exemplar", []), known.scores.get(task_hash, []))
        for shelf in sorted(shelves):
            _exemplars(store, task_hash, shelf, verdict, sources=sources)
            if progress is not None:
                progress(verdict.exemplars)
        for shelf in kinds.get("evaluation", []):
            _evaluations(store, task_hash, shelf, verdict)
        for shelf in kinds.get("claim", []):
            _claims(store, task_hash, shelf, verdict)
    for run_id in known.runs:
        _run(store, run_id, verdict)
    return verdict


@dataclass(frozen=True)
class _Moment:
    """The indexes of one shelf as the server had them at one moment."""

    stats: dict[bytes, bytes]
    filed: dict[bytes, bytes]
    """Exemplar id -> `seq|bucket|micro-score` of its entry."""
    scores: dict[bytes, float]
    pins: dict[bytes, bytes]
    on_islands: set[bytes]

    @classmethod
    def read(cls, store: ExemplarStore, task_hash: str, shelf: Shelf) -> _Moment:
        stats, filed, scores, pins, islands = store.connection.script("moment", store.shelf_keys(task_hash, shelf), [])
        numbers = {id: float(score) for id, score in _pairs(scores).items()}
        return cls(_pairs(stats), _pairs(filed), numbers, _pairs(pins), set(islands) - {ARRIVALS})

    def differences(self, shelf: Shelf) -> Iterator[str]:
        """Where the indexes disagree with each other."""
        for lonely in sorted(self.scores.keys() ^ self.filed.keys()):
            lacks = "a score but no record" if lonely in self.scores else "a record but no score"
            yield f"exemplar {lonely.decode()} has {lacks}"
        for gone in sorted(self.on_islands - self.filed.keys()):
            yield f"exemplar {gone.decode()} is on an island and has no record"
        counts: dict[int, list[int]] = {}
        for head in filter(None, self.filed.values()):
            _, index, micro = head.split(b"|")
            total = counts.setdefault(int(index), [0, 0])
            total[0] += 1
            total[1] += int(micro)
        stand = {
            int(name.decode().split("|")[-2]): [int(value), int(self.stats.get(name[:-1] + b"s", b"0"))]
            for name, value in self.stats.items()
            if name.startswith(f"{shelf}|".encode()) and name.endswith(b"|n")
        }
        for bucket in sorted(stand.keys() | counts.keys()):
            is_, should = stand.get(bucket, [0, 0]), counts.get(bucket, [0, 0])
            if is_ != should:
                yield (
                    f"bucket {bucket} counts {is_[0]} exemplars with sum {is_[1]}, the records give {should[0]} with "
                    f"{should[1]}"
                )
        yield from self._pin_differences(shelf)

    def _pin_differences(self, shelf: Shelf) -> Iterator[str]:
        counted: dict[bytes, int] = {}
        owned: Counter[bytes] = Counter()
        for name, value in self.pins.items():
            before, _, id = name.rpartition(b"|")
            if before == str(shelf).encode():
                counted[id] = int(value)
            elif before.endswith(f"|{shelf}".encode()):
                owned[id] += 1
        for id in sorted(counted.keys() | owned.keys()):
            if counted.get(id, 0) != owned[id]:
                yield f"exemplar {id.decode()} counts {counted.get(id, 0)} owners of pins and has {owned[id]}"
            if id not in self.filed:
                yield f"exemplar {id.decode()} is pinned and has no record"


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _exemplars(store: ExemplarStore, task_hash: str, shelf: Shelf, verdict: Verdict, *, sources: bool) -> None:
    """One shelf's indexes against each other, from one moment, and each record against them."""
    where = f"task {task_hash[:12]} on {shelf}"
    moment = _Moment.read(store, task_hash, shelf)
    verdict.exemplars += len(moment.filed)
    verdict.problems += [f"{where}: {difference}" for difference in moment.differences(shelf)]
    ids = sorted(moment.filed)
    name = store.keys.shelf(task_hash, "exemplars", shelf)
    for at in range(0, len(ids), _PAGE):
        page = ids[at : at + _PAGE]
        for id, entry in zip(page, store.connection.call("HMGET", name, *page), strict=True):
            if entry is None:  # removed since that moment
                continue
            unchanged = entry.startswith(moment.filed[id] + b"|")
            problem = _entry(store, shelf, id, entry, moment.scores.get(id) if unchanged else None, sources=sources)
            if problem:
                verdict.problems.append(f"{where}: exemplar {id.decode()} {problem}")


def _entry(store: ExemplarStore, shelf: Shelf, id: bytes, entry: bytes, score: float | None, *, sources: bool) -> str:
    """What is wrong with an entry, given its score if that is known; empty when nothing is."""
    try:
        _, bucket, micro, _ = entry.split(b"|", 3)
        exemplar = read_entry(entry)
    except ValueError:
        return "cannot be read: it has no heading"
    except StoreError as error:
        return f"cannot be read: {error}"
    if exemplar_id(exemplar.candidate_hash).encode() != id or Shelf.of(exemplar) != shelf:
        return "is filed under another name than its record's"
    if score is not None and score != exemplar.speedup:
        return f"has score {score} and speedup {exemplar.speedup}"
    rightful = (store.bucketing.index(exemplar.speedup), store.bucketing.micro_score(exemplar.speedup))
    if (int(bucket), int(micro)) != rightful:
        return f"is filed in bucket {int(bucket)}, its speedup {exemplar.speedup} belongs elsewhere"
    if sources and Candidate(source=exemplar.source).content_hash != exemplar.candidate_hash:
        return "has a source that does not give its hash"
    return ""


def _evaluations(store: ExemplarStore, task_hash: str, shelf: Shelf, verdict: Verdict) -> None:
    for name, data in _pages(store, store.keys.shelf(task_hash, "evaluations", shelf)):
        verdict.evaluations += 1
        try:
            key = CacheKey.of(read(FiledEvaluation, data).evaluation)
        except StoreError as error:
            verdict.problems.append(f"task {task_hash[:12]} on {shelf}: evaluation {name} cannot be read: {error}")
            continue
        if (key.field, key.shelf, key.task_hash) != (name, shelf, task_hash):
            verdict.problems.append(f"task {task_hash[:12]} on {shelf}: evaluation {name} is of something else")


def _claims(store: ExemplarStore, task_hash: str, shelf: Shelf, verdict: Verdict) -> None:
    for name, data in _pages(store, store.keys.shelf(task_hash, "claims", shelf)):
        verdict.claims += 1
        try:
            claim = read(Claim, data)
        except StoreError as error:
            verdict.problems.append(f"task {task_hash[:12]}: claim {name} cannot be read: {error}")
            continue
        if (exemplar_id(claim.candidate_hash), claim.shelf) != (name, shelf):
            verdict.problems.append(f"task {task_hash[:12]}: claim {name} is of something else")


def _run(store: ExemplarStore, run_id: str, verdict: Verdict) -> None:
    """Open groups have as many samples as they count, and no ledger more than were dispatched."""
    call, keys = store.connection.call, store.keys
    open_groups = call("HGETALL", keys.run(run_id, "open"))
    for group, task in sorted(open_groups.items()):
        outbox, state_key = (
            keys.task_run(task.decode(), "outbox", run_id),
            keys.group(task.decode(), run_id, group.decode()),
        )
        waited = call("SISMEMBER", outbox, group)  # first: what waits is whole, and stays so until it is gone
        state = call("HGETALL", state_key)
        if not state:  # relayed a moment ago, or announced and never opened
            continue
        verdict.groups += 1
        samples, left, size = sum(name.startswith(b"s:") for name in state), int(state[b"left"]), int(state[b"size"])
        if samples != left:
            verdict.problems.append(f"run {run_id}: group {group.decode()} counts {left} samples and holds {samples}")
        if waited and left != size:
            verdict.problems.append(f"run {run_id}: group {group.decode()} waits in the outbox and is not complete")
        if left == size and not call("SISMEMBER", outbox, group) and call("EXISTS", state_key):
            verdict.problems.append(f"run {run_id}: group {group.decode()} is complete and not in the outbox")
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
