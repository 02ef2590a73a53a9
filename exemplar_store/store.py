"""The exemplar store: kernels with their measured speedups, filed in performance buckets, and the measurement cache.

Invariants: a kernel stands once on a shelf (task, GPU type, precision, protocol), whoever inserts it and how often;
each write is one script on one slot; nothing unscored is ever answered from the cache.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self

from exemplar_store import metrics
from exemplar_store.buckets import Bucket, Bucketing, read_stats
from exemplar_store.codec import pack, read
from exemplar_store.config import StoreConfig
from exemplar_store.connection import Connection, ScriptCall, connect
from exemplar_store.errors import StoreUsageError, UnknownSchema
from exemplar_store.filed import CacheKey, FiledEvaluation
from exemplar_store.islands import DrawnIslands, choose_ids, plan_reset, read_population
from exemplar_store.keys import SCHEMA_VERSION, Keys, Shelf, exemplar_id
from exemplar_store.sampling import Strategy, create_strategy
from tasks.records import Candidate, Evaluation, Exemplar, Prompt, Task
from tasks.version import EVALUATOR_VERSION, PACKAGE_VERSION

PIPELINE_LENGTH = 128
"""Scripts sent in one round trip."""
BATCHES_UNDER_WAY = 8
"""Connections that send batches at the same time. The server syncs its file after each 16 KiB it reads of each."""


class InsertResult(NamedTuple):
    """What an insert did. A command repeated after a lost answer reports `new` as False although it was."""

    new: bool
    bucket: int
    """Index of the bucket that the kernel stands in; for a known kernel, that of its first measurement."""
    capped: int = 0
    """How many exemplars the bucket's caps removed."""


class ExemplarStore:
    """A store, by URL or folder. Safe to share between threads; one per process."""

    def __init__(self, connection: Connection, config: StoreConfig) -> None:
        self.connection = connection
        self.config = config
        self.keys = Keys(config.namespace)
        self.bucketing = Bucketing(config.bucket_scale, config.bucket_width)
        self.strategy: Strategy = create_strategy(config.strategy, config.temperature)
        self._registered: set[str] = set()
        self._drawn = DrawnIslands()

    @classmethod
    def connect(cls, location: str | Path, config: StoreConfig | None = None, *, adopt_buckets: bool = False) -> Self:
        """Opens the store at a URL or in a folder, creating it when it is empty.

        Buckets that differ from the configuration's are refused, or taken over with `adopt_buckets` or without a
        configuration: for one who is told where a store is and not how it was made.
        Raises StoreUnreachable, StoreLocked, UnknownSchema, StoreUsageError or StoreError.
        """
        connection = connect(location, config or StoreConfig())
        try:
            store = cls(connection, config or StoreConfig())
            store._open(adopt=adopt_buckets or config is None)
        except BaseException:
            connection.close()
            raise
        return store

    @property
    def url(self) -> str:
        """Where other processes of this machine reach the same store; only for a store opened by folder."""
        if self.connection.server is None:
            raise StoreUsageError(f"the store at {self.connection.place} was opened by URL: pass that on")
        return self.connection.server.url

    def close(self) -> None:
        """Closes the connections, and the embedded server when this store started it."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def insert(self, exemplar: Exemplar, *, replace: bool = False) -> InsertResult:
        """Files a kernel in its bucket, once. A known kernel keeps its first measurement unless `replace`.

        Raises StoreFull when the server has no room (nothing is written), StoreUsageError for a speedup or a name
        that cannot be filed.
        """
        self.register_task(exemplar.task_hash, exemplar.task_id)
        call = ("insert", self.place_keys(exemplar), self.place_arguments(exemplar, replace=replace))
        return self._insert_batch([call])[0]

    def insert_many(self, exemplars: Iterable[Exemplar], *, replace: bool = False) -> list[InsertResult]:
        """Files many kernels, pipelined; each is atomic, the whole is not. The results are in the order of the kernels.

        Several batches are under way at once, so that one sync of the server's file covers them all; they may arrive
        in another order.
        """
        results: list[InsertResult] = []
        under_way: deque[Future[list[InsertResult]]] = deque()
        with ThreadPoolExecutor(BATCHES_UNDER_WAY) as senders:
            for batch in _batches(exemplars, PIPELINE_LENGTH):
                calls: list[ScriptCall] = []
                for exemplar in batch:
                    self.register_task(exemplar.task_hash, exemplar.task_id)
                    filing = self.place_arguments(exemplar, replace=replace)
                    calls.append(("insert", self.place_keys(exemplar), filing))
                if len(under_way) == BATCHES_UNDER_WAY:
                    results += under_way.popleft().result()
                under_way.append(senders.submit(self._insert_batch, calls))
            while under_way:
                results += under_way.popleft().result()
        return results

    def draw(
        self,
        task_hash: str,
        device_type: str,
        rng: Random,
        count: int = 2,
        *,
        precision: str | None = None,
        protocol: str | None = None,
    ) -> list[Exemplar]:
        """At most `count` exemplars of a task on a device type by the configured strategy, worst first.

        Fewer come back when the strategy finds no more to choose from (cold start: see `sampling`). Where precision
        or protocol are None, the fitting shelf with the most exemplars is used; never two shelves at once.
        """
        begin = time.perf_counter()
        found: dict[str, Exemplar] = {}
        shelf, buckets = self._fullest(task_hash, device_type, precision, protocol)
        if self.config.strategy == "islands":
            found = self._draw_from_island(task_hash, shelf or Shelf(device_type), rng, count)
        elif shelf is not None:
            picks = self.strategy.choose(buckets, count, rng)
            bounds = [
                part
                for pick in picks
                for part in (*self.bounds(pick.bucket), pick.place)
            ]  # fmt: skip
            if bounds:
                keys = [self.keys.shelf(task_hash, name, shelf) for name in ("exemplars", "scores")]
                for entry in self.connection.script("pick", keys, bounds):
                    exemplar = read_entry(entry)
                    found[exemplar.candidate_hash] = exemplar
        metrics.DRAWS.labels(self.strategy.name, str(len(found))).inc()
        metrics.DRAW_SECONDS.observe(time.perf_counter() - begin)
        return sorted(found.values(), key=lambda exemplar: exemplar.speedup)

    def bucket_mates(self, exemplar: Exemplar, limit: int = 32) -> list[Exemplar]:
        """At most `limit` other exemplars of the bucket that one lies in, slowest first.

        They can stand in for it in a prompt that it is too long for. None with islands, whose kernels do not mix.
        """
        if self.config.strategy == "islands":
            return []
        exemplars, scores, *_ = self.place_keys(exemplar)
        low, high = self.bounds(self.bucketing.index(exemplar.speedup))
        ids = self.connection.call("ZRANGEBYSCORE", scores, low, high, "LIMIT", 0, limit + 1)
        entries = self.connection.call("HMGET", exemplars, *ids) if ids else []
        found = [read_entry(entry) for entry in entries if entry is not None]
        return [one for one in found if one.candidate_hash != exemplar.candidate_hash][:limit]

    def home_of(self, prompt: Prompt) -> int | None:
        """The island on which a prompt's samples are born; None under any other strategy."""
        return self._drawn.home(prompt.task_hash, frozenset(prompt.exemplar_hashes))

    def best(
        self, task_hash: str, device_type: str, *, precision: str | None = None, protocol: str | None = None
    ) -> Exemplar | None:
        """The fastest exemplar of a task on a device type, or None. The shelf is chosen as in `draw`."""
        found = self.top(task_hash, device_type, 1, precision=precision, protocol=protocol)
        return found[0] if found else None

    def top(
        self,
        task_hash: str,
        device_type: str,
        count: int,
        *,
        precision: str | None = None,
        protocol: str | None = None,
    ) -> list[Exemplar]:
        """The fastest exemplars of a task on a device type, best first."""
        shelf, _ = self._fullest(task_hash, device_type, precision, protocol)
        if shelf is None or count < 1:
            return []
        keys = [self.keys.shelf(task_hash, name, shelf) for name in ("exemplars", "scores")]
        return [read_entry(entry) for entry in self.connection.script("top", keys, [count]) if entry]

    def shelves(self, task_hash: str) -> dict[Shelf, list[Bucket]]:
        """Non-empty buckets of every shelf of a task, lowest first."""
        return read_stats(self.connection.call("HGETALL", self.keys.task(task_hash, "stats")))

    def cached(self, key: CacheKey) -> Evaluation | None:
        """An earlier evaluation under the same key by this version of the evaluator, or None."""
        data = self.connection.call("HGET", self.keys.shelf(key.task_hash, "evaluations", key.shelf), key.field)
        evaluation = None if data is None else read(FiledEvaluation, data).evaluation
        if evaluation is not None and evaluation.versions.evaluator != EVALUATOR_VERSION:
            evaluation = None
        metrics.CACHE_LOOKUPS.labels("miss" if evaluation is None else "hit").inc()
        return evaluation

    def cache(self, key: CacheKey, evaluation: Evaluation, candidate: Candidate | None = None) -> bool:
        """Keeps an evaluation for `cached`, with its candidate's source and origin where given.

        An unscored evaluation says nothing about its candidate: it is not kept, and the answer is False.
        Raises StoreUsageError when the evaluation is of something else than the key says.
        """
        if CacheKey.of(evaluation) != key:
            raise StoreUsageError(f"the evaluation is of {CacheKey.of(evaluation)}, not of {key}")
        if evaluation.outcome == "unscored":
            return False
        self.register_task(evaluation.task_hash, evaluation.task_id)
        name = self.keys.shelf(key.task_hash, "evaluations", key.shelf)
        source, origin = ("", "") if candidate is None else (candidate.source, candidate.detail or candidate.origin)
        filed = FiledEvaluation(evaluation=evaluation, source=source, origin=origin)
        self.connection.call("HSET", name, key.field, pack(filed.to_json()))
        return True

    def put_task(self, task: Task) -> None:
        """Keeps the task's own record, so that its exemplars can be evaluated again from the store alone."""
        self.register_task(task.content_hash, task.id)
        self.connection.call("SET", self.keys.task(task.content_hash, "task"), pack(task.to_json()))

    def task(self, task_hash: str) -> Task | None:
        """The task's record, when it was given."""
        data = self.connection.call("GET", self.keys.task(task_hash, "task"))
        return None if data is None else read(Task, data)

    def tasks(self) -> dict[str, str]:
        """Task hash -> task id, of every task the store has heard of."""
        found = self.connection.call("HGETALL", self.keys.store("tasks"))
        return {task_hash.decode(): task_id.decode() for task_hash, task_id in found.items()}

    def register_task(self, task_hash: str, task_id: str) -> None:
        """Lists a task before its first write; a crash in between leaves a listed task without exemplars."""
        if task_hash not in self._registered:
            self.keys.task(task_hash, "stats")  # refuses what is not a hash
            self.connection.call("HSETNX", self.keys.store("tasks"), task_hash, task_id)
            self._registered.add(task_hash)

    def place_keys(self, exemplar: Exemplar) -> Sequence[str]:
        """Keys of `place.lua`: exemplars, scores, stats, pins, islands."""
        return self.shelf_keys(exemplar.task_hash, Shelf.of(exemplar))

    def shelf_keys(self, task_hash: str, shelf: Shelf) -> Sequence[str]:
        """As `place_keys`, by task and shelf."""
        return _shelf_keys(self.keys, task_hash, shelf)

    def place_arguments(self, exemplar: Exemplar, *, replace: bool = False) -> list[Any]:
        """Arguments of `place.lua`: what it must know in words, and the packed exemplar."""
        index = self.bucketing.index(exemplar.speedup)
        low, high = self.bounds(index)
        micro, caps = self.bucketing.micro_score(exemplar.speedup), self.config.caps
        filing = (
            f"{Shelf.of(exemplar)} {exemplar_id(exemplar.candidate_hash)} {exemplar.speedup!r} {micro} {index} {low} "
            f"{high} {replace:d} {caps.best} {caps.newest} {caps.random}"
        )
        return [filing, pack(exemplar.model_dump_json())]

    def bounds(self, index: int) -> tuple[str, str]:
        """A bucket's range as the server's sorted sets write it: inclusive low, exclusive high."""
        return repr(self.bucketing.low(index)), f"({self.bucketing.high(index)!r}"

    def _draw_from_island(self, task_hash: str, shelf: Shelf, rng: Random, count: int) -> dict[str, Exemplar]:
        exemplars, scores, _, _, islands = self.shelf_keys(task_hash, shelf)
        queries = [("ZRANGE", scores, 0, -1, "WITHSCORES"), ("HGETALL", islands)]
        population = read_population(*self.connection.calls(queries))
        island = rng.randrange(self.config.islands)
        ids = choose_ids(population.on(island), self.strategy, self.bucketing, count, rng)
        entries = self.connection.call("HMGET", exemplars, *ids) if ids else []
        found = [read_entry(entry) for entry in entries if entry is not None]
        drawn = {exemplar.candidate_hash: exemplar for exemplar in found}
        self._drawn.remember(task_hash, frozenset(drawn), island)
        if population.arrivals >= self.config.island_reset_every:
            plan = plan_reset(population, self.config.islands, rng)
            arguments = [self.config.island_reset_every, *(part for emptied in plan for part in emptied)]
            self.connection.script("reset_islands", [islands], arguments)
        return drawn

    def _insert_batch(self, batch: Sequence[ScriptCall]) -> list[InsertResult]:
        results = [
            InsertResult(bool(new), int(bucket), capped) for new, bucket, capped in self.connection.scripts(batch)
        ]
        for result in results:
            metrics.INSERTS.labels("new" if result.new else "known").inc()
            metrics.CAPPED.inc(result.capped)
        return results

    def _fullest(
        self, task_hash: str, device_type: str, precision: str | None, protocol: str | None
    ) -> tuple[Shelf | None, list[Bucket]]:
        fitting = [
            (sum(bucket.count for bucket in buckets), shelf, buckets)
            for shelf, buckets in self.shelves(task_hash).items()
            if shelf.device_type == device_type
            and precision in (None, shelf.precision)
            and protocol in (None, shelf.protocol)
        ]
        _, shelf, buckets = max(fitting, key=lambda found: found[:2], default=(0, None, []))
        return shelf, buckets

    def _open(self, *, adopt: bool) -> None:
        """Writes what a new store is, or checks what an old one was; with `adopt`, takes its buckets over."""
        ours = {
            "schema": str(SCHEMA_VERSION), "bucket_scale": self.bucketing.scale,
            "bucket_width": repr(self.bucketing.width), "made_by": PACKAGE_VERSION,
        }  # fmt: skip
        arguments = [part for item in ours.items() for part in item]
        flat = self.connection.script("open_store", [self.keys.store("meta")], arguments)
        stands = {flat[at].decode(): flat[at + 1].decode() for at in range(0, len(flat), 2)}
        place = self.connection.place
        schema = _known_schema(stands, place)
        if adopt:
            scale: Any = stands["bucket_scale"]
            self.bucketing = Bucketing(scale, float(stands["bucket_width"]))
        elif (stands["bucket_scale"], stands["bucket_width"]) != (ours["bucket_scale"], ours["bucket_width"]):
            raise StoreUsageError(
                f"the store at {place} has {stands['bucket_scale']} buckets of width {stands['bucket_width']}, the "
                f"configuration asks for {ours['bucket_scale']} ones of {ours['bucket_width']}: set "
                "store.bucket_scale and store.bucket_width to the store's, or use another namespace"
            )
        if schema < SCHEMA_VERSION:
            from exemplar_store.migrations import migrate

            migrate(self, schema)


def _known_schema(stands: Mapping[str, str], place: str) -> int:
    """The schema of a store that this version reads or migrates; raises UnknownSchema for any other."""
    from exemplar_store.migrations import STEPS

    schema = stands.get("schema", "none")
    if schema.isdecimal() and int(schema) in (*STEPS, SCHEMA_VERSION):
        return int(schema)
    raise UnknownSchema(
        f"the store at {place} has schema {schema} and this version reads {SCHEMA_VERSION}: open it with kontrast "
        f"{stands.get('made_by', 'of another version')} and export it, or use another folder or namespace"
    )


@lru_cache(maxsize=4096)
def _shelf_keys(keys: Keys, task_hash: str, shelf: Shelf) -> tuple[str, ...]:
    exemplars, scores, islands = (keys.shelf(task_hash, name, shelf) for name in ("exemplars", "scores", "islands"))
    return exemplars, scores, keys.task(task_hash, "stats"), keys.task(task_hash, "pins"), islands


def _batches(exemplars: Iterable[Exemplar], length: int) -> Iterator[list[Exemplar]]:
    source = iter(exemplars)
    while batch := list(islice(source, length)):
        yield batch


def read_entry(entry: bytes) -> Exemplar:
    """The exemplar of an entry as `place.lua` writes it."""
    return read(Exemplar, entry.split(b"|", 3)[3])
