"""Export and import of a store as JSON lines.

    {"format":"kontrast-store","kind":"exemplar","record":{...},"schema":1}

Invariants: equal contents give equal bytes, whatever the order of arrival; an interrupted export goes on where its file
ends, unless the store has got more since, an interrupted import where its last acknowledged line ends; importing twice
changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO, cast

from pydantic import ValidationError

from exemplar_store.codec import pack
from exemplar_store.contents import KINDS, Item, Kind, Place, contents, items
from exemplar_store.errors import StoreUsageError
from exemplar_store.filed import CacheKey, Claim, FiledEvaluation
from exemplar_store.foreign import UNKNOWN_DEVICE, is_cuda_l1, is_kernelbench_run, read_cuda_l1, read_kernelbench_run
from exemplar_store.hacking_cases import CASE_FIELDS, HackingCase, HackingCases
from exemplar_store.keys import Shelf, exemplar_id
from exemplar_store.store import ExemplarStore
from tasks.records import Exemplar, Task
from tasks.records.base import Record, digest, stable_json

FORMAT = "kontrast-store"
LINE_SCHEMA = 1
"""Version of the lines; the store's own layout has another."""
LINES_PER_MARK = 1024
"""Lines filed before the place is marked at which an interrupted import goes on."""
Progress = Callable[[int], None]
"""Called now and then with the number of lines done so far."""


def _quiet(_: int) -> None:
    """Reports nothing."""


def export_file(store: ExemplarStore, path: Path, progress: Progress = _quiet) -> int:
    """Writes the whole store to a file, streamed; how many lines it has.

    The file appears whole or not at all: until then it is `<path>.<size of the store>.part`, and an export that finds
    one goes on after its last whole line. A part of the store as it was before later records came is begun anew, since
    they may stand before its end. Raises StoreUsageError when the file cannot be written or the part is of something
    else.
    """
    if path.exists() and not path.is_file():
        raise StoreUsageError(f"{path} is no regular file: name one, or - for standard output")
    part = path.with_name(f"{path.name}.{_size_mark(store)}.part")
    try:
        for stale in set(path.parent.glob(f"{escape(path.name)}.*.part")) - {part}:
            stale.unlink()
        done, after = _resume_point(part)
        with part.open("ab") as file:
            for line in export_lines(store, after=after, with_cases=done == 0):
                file.write(line.encode() + b"\n")
                done += 1
                if done % LINES_PER_MARK == 0:
                    progress(done)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise StoreUsageError(f"{path} cannot be written: {error.strerror}; name another file") from error
    progress(done)
    return done


def export_lines(store: ExemplarStore, *, after: Place | None = None, with_cases: bool = True) -> Iterator[str]:
    """The lines of an export: hacking cases, then each task with its records."""
    if with_cases:
        for case in HackingCases(store).all():
            yield _line("hacking_case", case)
    for item in items(store, after=after):
        yield _line(item.kind, item.record)


def _line(kind: str, record: Record) -> str:
    return stable_json(
        {"format": FORMAT, "schema": LINE_SCHEMA, "kind": kind, "record": record.model_dump(mode="json")}
    )


def _size_mark(store: ExemplarStore) -> str:
    """Names how much a store holds: changes with every record that comes or goes."""
    known = contents(store)
    commands: list[tuple[str, ...]] = [("HLEN", store.keys.store("hacking"))]
    for task_hash, kinds in known.shelves.items():
        commands += [
            ("HGET", store.keys.task(task_hash, "stats"), "seq"),
            ("EXISTS", store.keys.task(task_hash, "task")),
        ]
        for kind, shelves in sorted(kinds.items()):
            commands += [("HLEN", store.keys.shelf(task_hash, f"{kind}s", shelf)) for shelf in shelves]
    counts = store.connection.calls(commands)
    return digest("export", *known.shelves, *map(repr, zip(commands, counts, strict=True)))[:12]


def _resume_point(part: Path) -> tuple[int, Place | None]:
    """Cuts a torn last line off; how many whole lines there are, and the place of the last.

    A part that ends among the hacking cases, which come first and are few, is begun anew.
    """
    if not part.exists():
        return 0, None
    done, last, whole = 0, b"", 0
    with part.open("r+b") as file:
        for line in file:
            if line.endswith(b"\n"):
                done, last, whole = done + 1, line, whole + len(line)
        item = _read_line(json.loads(last), part.name) if last else None
        if not isinstance(item, Item):
            done, whole = 0, 0
        file.truncate(whole)
    return done, item.place if isinstance(item, Item) else None


@dataclass
class Imported:
    """What an import did."""

    read: int = 0
    """Lines or files read now; those of an earlier, interrupted import are not counted again."""
    new: Counter[str] = field(default_factory=Counter)
    """New records by kind."""
    known: Counter[str] = field(default_factory=Counter)
    """Records that were in the store already."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Unusable ones by reason."""
    resumed: bool = False


def import_path(
    store: ExemplarStore,
    path: Path,
    *,
    device_type: str = UNKNOWN_DEVICE,
    load_task: Callable[[str], Task] | None = None,
    progress: Progress = _quiet,
) -> Imported:
    """Imports an export, CUDA-L1's released lines, hacking cases, or a KernelBench run folder, told by the content.

    `device_type` is where the claims of foreign files were measured. Raises StoreUsageError naming the first line that
    fits no format; what came before it is in the store, and importing again is safe.
    """
    if is_kernelbench_run(path):
        return _import_run(store, path, device_type, load_task, progress)
    if not path.is_file():
        raise StoreUsageError(f"{path} is neither a file of JSON lines nor a KernelBench run folder")
    result = Imported()
    mark, marks = _fingerprint(path), store.keys.store("imports")
    known_offset = store.connection.call("HGET", marks, mark)
    pending: list[Record] = []
    offset = 0

    def flush() -> None:
        _file(store, pending, result)
        pending.clear()
        store.connection.call("HSET", marks, mark, offset)
        progress(result.read)

    with path.open("rb") as file:
        if known_offset is not None:
            offset, result.resumed = int(known_offset), True
            file.seek(offset)
        try:
            for end, records in _read_lines(file, path, offset, device_type, result.skipped):
                offset = end
                pending += records
                result.read += 1
                if result.read % LINES_PER_MARK == 0:
                    flush()
        except StoreUsageError:
            flush()
            raise
    flush()
    store.connection.call("HDEL", marks, mark)
    return result


def _import_run(
    store: ExemplarStore, folder: Path, device_type: str, load_task: Callable[[str], Task] | None, progress: Progress
) -> Imported:
    if load_task is None:
        from tasks.suites import load_task as load_from_suite

        load_task = load_from_suite
    result = Imported()
    for found in read_kernelbench_run(folder, device_type, load_task, result.skipped):
        _file(store, found, result)
        result.read += 1
        progress(result.read)
    return result


def _read_lines(
    file: BinaryIO, path: Path, offset: int, device_type: str, skipped: Counter[str]
) -> Iterator[tuple[int, Sequence[Record]]]:
    """For each line from `offset` on: where it ends, and its records."""
    for line in file:
        offset += len(line)
        records: Sequence[Record] = ()
        if line.strip():
            where = f"{path}, the line that ends at byte {offset}"
            try:
                value = json.loads(line)
            except ValueError as error:
                raise StoreUsageError(f"{where}, is not JSON: {error}") from error
            if isinstance(value, dict) and is_cuda_l1(value):
                records = read_cuda_l1(value, device_type, skipped) or ()
            else:
                item = _read_line(value, where)
                records = [item.record if isinstance(item, Item) else item]
        yield offset, records


def _read_line(value: Any, where: str) -> Item | HackingCase:
    """The record of one line of an export, or the hacking case that a line is by itself."""
    if isinstance(value, dict) and value.keys() >= CASE_FIELDS:
        value = {"format": FORMAT, "schema": LINE_SCHEMA, "kind": "hacking_case", "record": value}
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise StoreUsageError(
            f"{where}, is neither a line of an export, nor one of CUDA-L1's release, nor a hacking case"
        )
    if value.get("schema") != LINE_SCHEMA:
        raise StoreUsageError(
            f"{where}, has schema {value.get('schema')} and this version reads {LINE_SCHEMA}: import it with the "
            "version that exported it, and export it with this one"
        )
    kinds: dict[str, type[Record]] = {"task": Task, "exemplar": Exemplar, "evaluation": FiledEvaluation, "claim": Claim}
    kind = value.get("kind")
    try:
        if kind == "hacking_case":
            return HackingCase.model_validate(value.get("record"))
        record = kinds[cast(str, kind)].model_validate(value.get("record"))
    except (KeyError, ValidationError) as error:
        raise StoreUsageError(f"{where}, holds no {kind} this version can read") from error
    return _item(cast(Kind, kind), record)


def _item(kind: Kind, record: Any) -> Item:
    rank = KINDS.index(kind)
    if isinstance(record, Task):
        return Item(Place(record.content_hash, rank, "", ""), kind, record)
    if isinstance(record, FiledEvaluation):
        key = CacheKey.of(record.evaluation)
        return Item(Place(key.task_hash, rank, str(key.shelf), key.field), kind, record)
    shelf = record.shelf if isinstance(record, Claim) else Shelf.of(record)
    return Item(Place(record.task_hash, rank, str(shelf), exemplar_id(record.candidate_hash)), kind, record)


def _file(store: ExemplarStore, records: Sequence[Record], result: Imported) -> None:
    """Files records of any kind; known ones stay as they are."""
    exemplars = [record for record in records if isinstance(record, Exemplar)]
    for inserted in store.insert_many(exemplars):
        (result.new if inserted.new else result.known)["exemplar"] += 1
    commands: list[tuple[str, Sequence[Any]]] = []
    for record in records:
        if isinstance(record, HackingCase):
            commands.append(("hacking_case", ("HSETNX", store.keys.store("hacking"), record.id, record.to_json())))
        elif isinstance(record, Task):
            store.register_task(record.content_hash, record.id)
            name = store.keys.task(record.content_hash, "task")
            commands.append(("task", ("SETNX", name, pack(record.to_json()))))
        elif isinstance(record, FiledEvaluation):
            key = CacheKey.of(record.evaluation)
            store.register_task(key.task_hash, record.evaluation.task_id)
            name = store.keys.shelf(key.task_hash, "evaluations", key.shelf)
            commands.append(("evaluation", ("HSETNX", name, key.field, pack(record.to_json()))))
        elif isinstance(record, Claim):
            store.register_task(record.task_hash, record.task_id)
            name = store.keys.shelf(record.task_hash, "claims", record.shelf)
            filed = ("HSETNX", name, exemplar_id(record.candidate_hash), pack(record.to_json()))
            commands.append(("claim", filed))
    answers = store.connection.calls([command for _, command in commands])
    for (kind, _), new in zip(commands, answers, strict=True):
        (result.new if new else result.known)[kind] += 1


def _fingerprint(path: Path) -> str:
    """Names a file's content well enough to resume its import: size and both ends."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(65536)
        file.seek(max(0, size - 65536))
        return hashlib.sha256(str(size).encode() + head + file.read()).hexdigest()[:32]
