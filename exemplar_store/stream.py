"""One run in the store: its events, its groups on their way to the learner, and who may take them.

A group's way: `open_group` -> `record` once per sample -> (last sample) outbox, in the same script -> `relay` ->
stream `scored` -> `read_scored` -> trained, checkpoint complete -> `ack`.

Invariants: a sample leaves its group once, by id; a group enters `scored` once, whatever relay crashes where; entries
stay pending until acked; only the newest holder of the role `learner` reads, claims or acks; an event is appended once
although its answer was lost.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from exemplar_store import metrics
from exemplar_store.codec import pack, read
from exemplar_store.errors import StaleToken, StoreUsageError
from exemplar_store.filed import CacheKey, FiledEvaluation
from exemplar_store.keys import Shelf
from exemplar_store.store import ExemplarStore
from tasks.records import Exemplar, Prompt, Sample, ScoredGroup, ScoredSample
from tasks.records.base import stable_json

LEARNERS = "learner"
"""Name of the consumer group, and of the role whose token guards it."""
COORDINATOR = "coordinator"
"""Role whose token guards the event stream, once it was taken."""
_PAGE = 500
_CLAIM_PAGE = 64


class GroupProgress(NamedTuple):
    """What recording a sample did to its group."""

    recorded: bool
    """False when this sample had left before."""
    left: int
    """Samples that have left; 0 for a group that has already been relayed."""
    size: int
    complete: bool
    """The group is whole: it waits in the outbox for `relay`, or has been relayed."""
    new_exemplar: bool = False
    bucket: int | None = None
    """Bucket of the exemplar that came with the sample."""


class RunStream:
    """The part of the store that belongs to one run. One per process and role; not to be shared between threads."""

    def __init__(self, store: ExemplarStore, run_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self._connection = store.connection
        self._keys = store.keys
        self._writer = secrets.token_hex(8)
        self._appended = 0
        self._tokens: dict[str, int] = {}
        self._last_read: dict[str, str] = {}
        self._has_consumer_group = False
        self._run("events")  # refuses an ill-formed run id

    def append(self, event: dict[str, Any]) -> None:
        """Appends one event. Raises StaleToken when another coordinator has taken over since `fence("coordinator")`."""
        token = self._tokens.get(COORDINATOR, "")
        number = self._appended + 1
        keys = [self._run("events"), self._run("writers"), self._run(f"fence:{COORDINATOR}")]
        answer = self._connection.script("append", keys, [self._writer, number, stable_json(event), token])
        if answer == -1:
            raise StaleToken(f"another coordinator of run {self.run_id} has taken over: this one must end")
        self._appended = number

    def events(self) -> Iterator[dict[str, Any]]:
        """All events of the run, oldest first, as they were appended."""
        start = "-"
        while True:
            page = self._connection.call("XRANGE", self._run("events"), start, "+", "COUNT", _PAGE)
            for entry_id, fields in page:
                start = f"({entry_id.decode()}"
                yield json.loads(fields[b"event"])
            if len(page) < _PAGE:
                return

    def open_group(self, prompt: Prompt, size: int) -> bool:
        """Announces a group of `size` samples before they are dispatched; False when it was open already.

        Raises StoreUsageError for a prompt of another run, a size below one, or a second opening with another size.
        """
        if prompt.run_id != self.run_id or size < 1:
            raise StoreUsageError(
                f"group {prompt.id} of run {prompt.run_id} with {size} samples fits not {self.run_id}"
            )
        self.store.register_task(prompt.task_hash, prompt.task_id)
        # The run learns of the group first: after a crash between the two, the relay finds nothing to move.
        self._connection.calls([
            ("SADD", self._run("tasks"), prompt.task_hash),
            ("HSET", self._run("open"), prompt.id, prompt.task_hash),
        ])  # fmt: skip
        task = prompt.task_hash
        keys = [self._group(task, prompt.id), self._task(task, "done"), self._task(task, "ledger")]
        home = self.store.home_of(prompt)
        born_on = "" if home is None else f",{home},"
        opened = self._connection.script("open_group", keys, [prompt.id, size, pack(prompt.to_json()), born_on])
        if opened == -1:
            raise StoreUsageError(f"group {prompt.id} is open with another size than {size}")
        return bool(opened)

    def record(self, scored: ScoredSample, exemplar: Exemplar | None = None) -> GroupProgress:
        """A sample leaves its group: accepted, rejected, unscored, or cancelled when it has no evaluation.

        In one script: the group's state, the ledger, the measurement cache, the exemplar's bucket, the run's pin on it
        when it is the run's best on its shelf, and the outbox when the group is whole. Recording the same sample again
        changes nothing. Raises StoreUsageError for a sample of an unknown group, or an exemplar of something else.
        """
        task_hash = self._task_of(scored)
        if task_hash is None:
            return GroupProgress(False, 0, 0, complete=True)
        evaluation = scored.evaluation
        outcome = "cancelled" if evaluation is None else evaluation.outcome
        shelf, field, packed = Shelf("none"), "", b""
        if evaluation is not None and evaluation.outcome != "unscored":
            key = CacheKey.of(evaluation)
            source = "" if exemplar is not None or scored.sample.candidate is None else scored.sample.candidate.source
            filed = FiledEvaluation(evaluation=evaluation, source=source, origin=scored.sample.id)
            shelf, field, packed = key.shelf, key.field, pack(filed.to_json())
        placing: list[Any] = []
        if exemplar is not None:
            if outcome != "accepted" or exemplar.task_hash != task_hash:
                raise StoreUsageError(f"sample {scored.sample.id} is {outcome}: it brings no exemplar of its task")
            placing = [*self.store.place_arguments(exemplar), self.run_id, repr(exemplar.measurement.ci_low)]
            keys = list(self.store.place_keys(exemplar))
        else:
            keys = list(self.store.shelf_keys(task_hash, shelf))
        sample = scored.sample
        status, left, size, new, bucket = self._connection.script(
            "record",
            [
                self._group(task_hash, sample.prompt_id), self._task(task_hash, "done"),
                self._task(task_hash, "outbox"), self._task(task_hash, "ledger"),
                self._keys.shelf(task_hash, "evaluations", shelf), *keys, self._task(task_hash, "best"),
            ],
            [sample.prompt_id, sample.id, sample.index, outcome, pack(scored.to_json()), field, packed, *placing],
        )  # fmt: skip
        if status == -1:
            raise StoreUsageError(f"group {sample.prompt_id} of run {self.run_id} was never opened")
        if status == -2:
            raise StoreUsageError(f"sample {sample.id} has index {sample.index} in a group of {size}")
        if status == 1:
            metrics.RECORDED.labels(outcome).inc()
        return GroupProgress(
            status == 1, left, size, left == size, bool(new), int(bucket) if bucket != b"" else None
        )  # fmt: skip

    def cancel(self, sample_ids: Iterable[str]) -> list[GroupProgress]:
        """The samples leave unevaluated. Those that have left before stay what they were."""
        progress = []
        for sample_id in sample_ids:
            prompt_id, _, index = sample_id.rpartition("/")
            if not prompt_id or not index.isdecimal():
                raise StoreUsageError(f"{sample_id!r} is not a sample id: <prompt id>/<index> is needed")
            sample = Sample(id=sample_id, prompt_id=prompt_id, index=int(index), text="", finish_reason="abort")
            progress.append(self.record(ScoredSample(sample=sample, evaluation=None)))
        return progress

    def ledger(self) -> dict[str, int]:
        """Samples of the run: dispatched, accepted, rejected, unscored, cancelled, in_flight; exact between scripts."""
        totals = dict.fromkeys(("dispatched", "accepted", "rejected", "unscored", "cancelled"), 0)
        tasks = [task.decode() for task in self._connection.call("SMEMBERS", self._run("tasks"))]
        for counts in self._connection.calls([("HGETALL", self._task(task, "ledger")) for task in tasks]):
            for name, count in counts.items():
                totals[name.decode()] += int(count)
        return totals | {"in_flight": 2 * totals["dispatched"] - sum(totals.values())}

    def group(self, group_id: str, task_hash: str) -> ScoredGroup | None:
        """A group as it stands: its prompt and the samples that have left so far; None for one that was never opened,
        or that a learner has acked."""
        fields = self._connection.call("HGETALL", self._group(task_hash, group_id))
        if fields:
            return _assemble(group_id, self.run_id, fields)
        for _, entry in self._scored_entries():
            if entry[b"group"].decode() == group_id:
                return read(ScoredGroup, entry[b"packed"])
        return None

    def pending_prompts(self) -> Iterator[Prompt]:
        """Prompts of all groups that are open, or that no complete checkpoint contains yet."""
        for group_id, task_hash in self._connection.call("HGETALL", self._run("open")).items():
            packed = self._connection.call("HGET", self._group(task_hash.decode(), group_id.decode()), "prompt")
            if packed is not None:
                yield read(Prompt, packed)
        for _, entry in self._scored_entries():
            yield read(ScoredGroup, entry[b"packed"]).prompt

    def relay(self) -> int:
        """Moves every complete group into `scored`, each once; how many this call moved. Anyone may call it."""
        return sum(self.relay_steps())

    def relay_steps(self) -> Iterator[int]:
        """`relay`, stopping after each exchange with the server: the places where a crash can fall.

        Yields 1 after the exchange that moved a group, else 0. A group is published (run's slot), then closed (task's
        slot), then struck from the run's list: a relay that ends in between leaves work that the next one finishes.
        """
        open_groups = self._connection.call("HGETALL", self._run("open"))
        by_task: dict[str, set[str]] = {}
        for group_id, task_hash in open_groups.items():
            by_task.setdefault(task_hash.decode(), set()).add(group_id.decode())
        yield 0
        tasks = sorted(by_task)
        queries: list[tuple[str, ...]] = []
        for task in tasks:
            queries += [
                ("SMEMBERS", self._task(task, "outbox")),
                ("SMISMEMBER", self._task(task, "done"), *sorted(by_task[task])),
            ]
        answers = self._connection.calls(queries)
        yield 0
        for at, task in enumerate(tasks):
            for group_id in sorted(group.decode() for group in answers[2 * at]):
                yield from self._move(task, group_id)
            done = zip(sorted(by_task[task]), answers[2 * at + 1], strict=True)
            struck = [group_id for group_id, closed in done if closed]
            if struck:
                self._connection.call("HDEL", self._run("open"), *struck)
                yield 0

    def _move(self, task_hash: str, group_id: str) -> Iterator[int]:
        fields = self._connection.call("HGETALL", self._group(task_hash, group_id))
        yield 0
        if fields:  # else another relay has just closed it
            packed = pack(_assemble(group_id, self.run_id, fields).to_json())
            keys = [self._run("relayed"), self._run("scored")]
            moved = self._connection.script("relay_publish", keys, [group_id, packed]) is not None
            metrics.RELAYED.inc(moved)
            yield int(moved)
        keys = [self._group(task_hash, group_id), self._task(task_hash, "done"), self._task(task_hash, "outbox")]
        self._connection.script("relay_close", keys, [group_id])
        yield 0
        self._connection.call("HDEL", self._run("open"), group_id)
        yield 0

    def fence(self, role: str) -> int:
        """Takes a role over: the new token makes every earlier holder's appends, reads, claims and acks fail."""
        token = int(self._connection.call("INCR", self._run(f"fence:{role}")))
        self._tokens[role] = token
        return token

    def read_scored(self, consumer: str, count: int, block_ms: int) -> list[tuple[str, ScoredGroup]]:
        """At most `count` groups nobody has read yet, waiting up to `block_ms` for the first; they stay pending.

        Raises StaleToken when a newer learner holds the role.
        """
        self._ensure_consumer_group()
        deadline = time.monotonic() + block_ms / 1000
        while True:
            arguments = [self._token(), LEARNERS, consumer, count, self._last_read.get(consumer, "0-0")]
            status, entries, delivered = self._connection.script("read_scored", self._guarded(), arguments)
            self._check(status)
            groups = self._groups(consumer, entries)
            left_ms = int((deadline - time.monotonic()) * 1000)
            if groups or left_ms <= 0:
                return groups
            wait_ms = min(left_ms, int(self.store.config.reply_timeout_s * 500))
            start = delivered.decode() or "0-0"
            self._connection.call("XREAD", "COUNT", 1, "BLOCK", wait_ms, "STREAMS", self._run("scored"), start)

    def claim_all(self, token: int, consumer: str = LEARNERS) -> list[tuple[str, ScoredGroup]]:
        """Every pending group of earlier learners becomes this consumer's; oldest first. For the start of a learner.

        The caller acks those its checkpoint contains and trains the rest. Raises StaleToken when `token` is not the
        newest of the role `learner`.
        """
        self._ensure_consumer_group()
        self._tokens[LEARNERS] = token
        claimed: list[tuple[str, ScoredGroup]] = []
        start = "0-0"
        while True:
            arguments = [token, LEARNERS, consumer, start, _CLAIM_PAGE]
            status, following, entries = self._connection.script("claim", self._guarded(), arguments)
            self._check(status)
            claimed += self._groups(consumer, [entry for entry in entries if entry])
            start = following.decode()
            if start == "0-0":
                return claimed

    def ack(self, entry_ids: Sequence[str]) -> int:
        """The groups are in a complete checkpoint: they leave the stream. How many were pending.

        Raises StaleToken when a newer learner holds the role.
        """
        acked = 0
        for at in range(0, len(entry_ids), _PAGE):
            arguments = [self._token(), LEARNERS, *entry_ids[at : at + _PAGE]]
            answer = self._connection.script("ack", self._guarded(), arguments)
            self._check(answer)
            acked += answer
        return acked

    def _scored_entries(self) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
        """What is in `scored`, oldest first: groups that nobody has acked."""
        start = "-"
        while True:
            page = self._connection.call("XRANGE", self._run("scored"), start, "+", "COUNT", _CLAIM_PAGE)
            for entry_id, entry in page:
                start = f"({entry_id.decode()}"
                yield entry_id, entry
            if len(page) < _CLAIM_PAGE:
                return

    def _groups(self, consumer: str, entries: Sequence[Any]) -> list[tuple[str, ScoredGroup]]:
        groups = []
        for entry_id, fields in entries:
            if not fields:  # acked by its earlier holder in the meantime
                continue
            values = {fields[at]: fields[at + 1] for at in range(0, len(fields), 2)}
            groups.append((entry_id.decode(), read(ScoredGroup, values[b"packed"])))
            self._last_read[consumer] = entry_id.decode()
        return groups

    def _ensure_consumer_group(self) -> None:
        if not self._has_consumer_group:
            self._connection.script("ensure_group", [self._run("scored")], [LEARNERS])
            self._has_consumer_group = True

    def _check(self, status: int) -> None:
        if status == -1:
            raise StaleToken(f"another learner of run {self.run_id} has taken over: this one must end")

    def _token(self) -> int:
        return self._tokens.get(LEARNERS, 0)

    def _guarded(self) -> list[str]:
        return [self._run("scored"), self._run(f"fence:{LEARNERS}")]

    def _run(self, name: str) -> str:
        return self._keys.run(self.run_id, name)

    def _task(self, task_hash: str, name: str) -> str:
        return self._keys.task_run(task_hash, name, self.run_id)

    def _group(self, task_hash: str, group_id: str) -> str:
        return self._keys.group(task_hash, self.run_id, group_id)

    def _task_of(self, scored: ScoredSample) -> str | None:
        """The task of a sample's group; None when the group has been relayed and only the evaluation could tell."""
        if scored.evaluation is not None:
            return scored.evaluation.task_hash
        group_id = scored.sample.prompt_id
        task_hash, relayed = self._connection.calls(
            [("HGET", self._run("open"), group_id), ("SISMEMBER", self._run("relayed"), group_id)]
        )
        if task_hash is None and not relayed:
            raise StoreUsageError(f"group {group_id} of run {self.run_id} was never opened")
        return None if task_hash is None else str(task_hash.decode())


def _assemble(group_id: str, run_id: str, fields: dict[bytes, bytes]) -> ScoredGroup:
    """The group from its state; samples by index."""
    samples = [read(ScoredSample, value) for name, value in fields.items() if name.startswith(b"s:")]
    return ScoredGroup(
        id=group_id, run_id=run_id, prompt=read(Prompt, fields[b"prompt"]),
        samples=tuple(sorted(samples, key=lambda scored: scored.sample.index)),
    )  # fmt: skip
