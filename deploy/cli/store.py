"""`kontrast store`: look into an exemplar store, move it, check it, make room."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasks.errors import UsageError
from tasks.figures import interval, times

if TYPE_CHECKING:
    from exemplar_store import ExemplarStore
    from exemplar_store.contents import Kind
    from tasks.records import Exemplar

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True,
    help="Look into an exemplar store, export and import it, verify it, make room in it.",
)  # fmt: skip

Where = Annotated[
    str,
    typer.Option(
        "--store", envvar="KONTRAST_STORE", metavar="URL|FOLDER", show_default=False,
        help="redis://, rediss://, unix:// or redis+sentinel:// URL, the folder of an embedded server, which `import` "
        "creates when missing, or a run.",
    ),
]  # fmt: skip
Namespace = Annotated[str, typer.Option(help="First part of every key.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[str, typer.Option("--device-type", help="GPU type, or cpu; empty means all.")]

_PROGRESS_EVERY_S = 1.0
_RETRIES = 4
"""A person who waits wants to know sooner than a run that a server does not answer."""


@app.command()
def stats(store: Where, namespace: Namespace = "kontrast", as_json: Json = False) -> None:
    """Count tasks, exemplars by shelf, evaluations, claims, hacking cases and runs."""
    with _opened(store, namespace) as opened:
        from exemplar_store.contents import stats as count

        counted = count(opened)
    if as_json:
        typer.echo(json.dumps(vars(counted), sort_keys=True))
        return
    total = sum(counted.exemplars.values())
    typer.echo(f"tasks           {counted.tasks:,}")
    typer.echo(f"exemplars       {total:,} in {counted.buckets:,} buckets")
    for shelf, number in sorted(counted.exemplars.items()):
        typer.echo(f"  {' '.join(shelf.split('|')):<32} {number:,}")
    typer.echo(f"evaluations     {counted.evaluations:,}")
    typer.echo(f"claims          {counted.claims:,} (imported, not measured here)")
    typer.echo(f"hacking cases   {counted.hacking_cases:,}")
    typer.echo(f"runs            {len(counted.runs)}{': ' if counted.runs else ''}{', '.join(counted.runs)}")
    if counted.memory_bytes is not None:
        typer.echo(f"server memory   {counted.memory_bytes / 2**20:,.1f} MiB")


@app.command()
def top(
    store: Where,
    task: Annotated[str, typer.Argument(help="Task id or hash; empty for the best of every task.")] = "",
    device_type: Device = "",
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many.")] = 10,
    namespace: Namespace = "kontrast",
    as_json: Json = False,
) -> None:
    """List the fastest exemplars: of one task, or the best of every task."""
    with _opened(store, namespace) as opened:
        hashes = [_find_task(opened, task)] if task else sorted(opened.tasks())
        found: list[Exemplar] = []
        for task_hash in hashes:
            for shelf in opened.shelves(task_hash):
                if device_type in ("", shelf.device_type):
                    found += opened.top(
                        task_hash, shelf.device_type, count if task else 1,
                        precision=shelf.precision, protocol=shelf.protocol,
                    )  # fmt: skip
    found.sort(key=lambda exemplar: (-exemplar.speedup, exemplar.task_id, exemplar.candidate_hash))
    for exemplar in found[:count]:
        if as_json:
            typer.echo(json.dumps(_row(exemplar), sort_keys=True))
        else:
            typer.echo(_line(exemplar))
    if not found and not as_json:
        typer.echo("no exemplars")


@app.command()
def show(
    store: Where,
    task: Annotated[str, typer.Argument(help="Task id or hash.")],
    exemplar: Annotated[str, typer.Argument(help="First digits of an exemplar's hash: print its source.")] = "",
    device_type: Device = "",
    namespace: Namespace = "kontrast",
    as_json: Json = False,
) -> None:
    """Show a task's buckets and exemplars, or one exemplar with its source."""
    with _opened(store, namespace) as opened:
        task_hash = _find_task(opened, task)
        named = opened.tasks()[task_hash]
        exemplars = _records(opened, task_hash, "exemplar", device_type)
        claims = _records(opened, task_hash, "claim", device_type)
        bucketing = opened.bucketing
    if exemplar:
        _show_one([*exemplars, *claims], exemplar, named, as_json=as_json)
        return
    if as_json:
        held = {"exemplars": [_row(record) for record in exemplars], "claims": [_row(claim) for claim in claims]}
        typer.echo(json.dumps({"task": named, "task_hash": task_hash, **held}, sort_keys=True))
        return
    typer.echo(f"{named}  {task_hash}")
    exemplars.sort(key=lambda record: (_shelf_words(record), -record.speedup, record.candidate_hash))
    for words, on_shelf in groupby(exemplars, _shelf_words):
        typer.echo(words)
        for index, inside in groupby(on_shelf, lambda record: bucketing.index(record.speedup)):
            typer.echo(f"  [{bucketing.low(index):.4g}, {bucketing.high(index):.4g})")
            for record in inside:
                typer.echo(f"    {_line(record, with_task=False)}")
    if claims:
        typer.echo("claims (imported, not measured here)")
        for claim in claims:
            typer.echo(f"    {_line(claim, with_task=False)}")


@app.command(name="export")
def export_(
    store: Where,
    out: Annotated[str, typer.Argument(help="File of JSON lines to write; - for standard output.")],
    namespace: Namespace = "kontrast",
) -> None:
    """Write everything as JSON lines: equal stores give equal bytes, an interrupted export goes on."""
    with _opened(store, namespace) as opened:
        from exemplar_store.transfer import export_file, export_lines

        if out == "-":
            _to_standard_output(export_lines(opened))
            return
        lines = export_file(opened, Path(out), _Progress("lines written"))
    typer.echo(f"{lines:,} lines in {out}")


@app.command(name="import")
def import_(
    store: Where,
    path: Annotated[
        Path, typer.Argument(help="An export, CUDA-L1's lines, hacking cases, or a KernelBench run folder.")
    ],
    device_type: Annotated[
        str, typer.Option("--device-type", help="Where foreign claims were measured, such as A100.")
    ] = "unknown",
    namespace: Namespace = "kontrast",
) -> None:
    """Read records in; speedups from other projects are kept as claims, never as measurements.

    The format is told by the content. Importing again changes nothing; an interrupted import goes on.
    """
    with _opened(store, namespace, create=True) as opened:
        from exemplar_store.transfer import import_path

        result = import_path(opened, path, device_type=device_type, progress=_Progress("lines read"))
    again = " (going on with an interrupted import)" if result.resumed else ""
    typer.echo(f"{result.read:,} read{again}: {_counts(result.new)} new, {_counts(result.known)} known")
    for reason, number in sorted(result.skipped.items()):
        typer.echo(f"skipped {number:,}: {reason}")


@app.command()
def prune(
    store: Where,
    best: Annotated[int, typer.Option(min=0, help="Fastest exemplars kept per bucket.")] = 0,
    newest: Annotated[int, typer.Option(min=0, help="Latest exemplars kept per bucket.")] = 0,
    random: Annotated[int, typer.Option(min=0, help="Size of the uniform sample kept per bucket.")] = 0,
    old_evaluations: Annotated[
        bool, typer.Option("--old-evaluations", help="Remove evaluations by other versions of the evaluator.")
    ] = False,
    forget: Annotated[
        str, typer.Option(metavar="RUN", help="First let go of what this run's report shows: it may be pruned then.")
    ] = "",
    namespace: Namespace = "kontrast",
) -> None:
    """Cut every bucket to its best, its newest and a random sample.

    What a run's report shows and what a group shows that a checkpoint leaves to be replayed stays.
    """
    if not (best or newest or random or old_evaluations or forget):
        raise UsageError(
            "nothing to prune: give at least one of --best, --newest, --random, --old-evaluations, --forget"
        )
    with _opened(store, namespace) as opened:
        from exemplar_store import pruning
        from exemplar_store.config import BucketCaps

        if forget:
            typer.echo(f"{pruning.unpin(opened, pruning.owner_of_run(forget)):,} exemplars no longer held by {forget}")
        if best or newest or random:
            removed = pruning.prune(opened, BucketCaps(best=best, newest=newest, random=random))
            typer.echo(f"{removed:,} exemplars removed")
        if old_evaluations:
            typer.echo(f"{pruning.prune_evaluations(opened):,} evaluations removed")


@app.command()
def verify(
    store: Where,
    sources: Annotated[bool, typer.Option("--sources", help="Hash every source anew as well.")] = False,
    namespace: Namespace = "kontrast",
) -> None:
    """Recount every index against the records. Exit code 0 when consistent, else 1 with what differs."""
    with _opened(store, namespace) as opened:
        from exemplar_store.verify import verify as recount

        verdict = recount(opened, sources=sources, progress=_Progress("exemplars recounted"))
    for problem in verdict.problems:
        typer.echo(problem)
    typer.echo(verdict.summary())
    raise typer.Exit(0 if verdict.consistent else 1)


@contextmanager
def _opened(location: str, namespace: str, *, create: bool = False) -> Iterator[ExemplarStore]:
    from exemplar_store import ExemplarStore, StoreConfig

    location = location if create else _existing(location)
    config = StoreConfig(namespace=namespace, retries=_RETRIES)
    with ExemplarStore.connect(location, config, adopt_buckets=True) as opened:
        yield opened


def _existing(location: str) -> str:
    """Where a store is: a URL, an embedded server's folder, or that of a run. Raises UsageError for none."""
    from exemplar_store.server import LOCK_FILE

    if "://" in location:
        return location
    folders = [Path(location), Path(location) / "store", Path("runs") / location / "store"]
    found = next((folder for folder in folders if (folder / LOCK_FILE).exists()), None)
    if found is None:
        raise UsageError(f"{location} holds no store: name a run, the folder of an embedded server, or a URL")
    return str(found)


def _to_standard_output(lines: Iterable[str]) -> None:
    """Raises UsageError when it cannot be written; a reader that has seen enough is no error of ours."""
    try:
        for line in lines:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"standard output cannot be written: {error.strerror}; the export is incomplete") from error


def _find_task(opened: ExemplarStore, name: str) -> str:
    """Hash of the task with this id, or whose hash begins so; raises UsageError when none or several do."""
    tasks = opened.tasks()
    found = [task_hash for task_hash, task_id in tasks.items() if task_id == name]
    found = found or [task_hash for task_hash in tasks if task_hash.startswith(name)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"the store knows no task {name}: `kontrast store top` lists those it has exemplars of")
    raise UsageError(f"{name} fits {len(found)} tasks ({', '.join(h[:12] for h in sorted(found))}): give more digits")


def _records(opened: ExemplarStore, task_hash: str, kind: Kind, device_type: str) -> list[Any]:
    """All exemplars or claims of one task."""
    from exemplar_store.contents import contents, shelf_items

    return [
        item.record
        for shelf in contents(opened).shelves[task_hash].get(kind, [])
        if device_type in ("", shelf.device_type)
        for item in shelf_items(opened, task_hash, kind, shelf)
    ]


def _show_one(records: list[Any], digits: str, named: str, *, as_json: bool) -> None:
    found = [record for record in records if record.candidate_hash.startswith(digits)]
    if not found:
        raise UsageError(f"{named} has no exemplar {digits}: `kontrast store show` without it lists them")
    for record in found:
        if as_json:
            typer.echo(record.to_json())
        else:
            typer.echo(f"# {_line(record)}")
            typer.echo(record.source)


def _shelf_words(record: Exemplar) -> str:
    return f"{record.device_type} {record.precision} {record.measurement.protocol}"


def _row(record: Any) -> dict[str, Any]:
    """One exemplar or claim for JSON; a claim has no interval and no protocol."""
    row = {
        "task": record.task_id, "task_hash": record.task_hash, "exemplar": record.candidate_hash,
        "device_type": record.device_type, "precision": record.precision, "origin": record.origin,
    }  # fmt: skip
    measured = getattr(record, "measurement", None)
    if measured is None:
        return row | {"claimed_speedup": record.claimed_speedup}
    figures = {"speedup": record.speedup, "ci_low": measured.ci_low, "ci_high": measured.ci_high}
    return row | figures | {"protocol": measured.protocol}


def _line(record: Any, *, with_task: bool = True) -> str:
    """One exemplar or claim for a person."""
    measured = getattr(record, "measurement", None)
    if measured is None:
        figures = "   unknown" if record.claimed_speedup is None else f"{times(record.claimed_speedup):>9} claimed"
    else:
        figures = f"{times(record.speedup):>9} ({interval(measured.ci_low, measured.ci_high)})"
    task = f"{record.task_id}  {record.device_type}  " if with_task else ""
    return f"{figures}  {task}{record.candidate_hash[:12]}  {record.origin}"


def _counts(counted: dict[str, int]) -> str:
    plural = {"hacking_case": "hacking cases", "evaluation": "evaluations", "exemplar": "exemplars"}
    parts = [f"{number:,} {plural.get(kind, f'{kind}s')}" for kind, number in sorted(counted.items()) if number]
    return ", ".join(parts) or "nothing"


class _Progress:
    """Says on stderr how far it is, at most once a second, and nothing for what is quick."""

    def __init__(self, words: str) -> None:
        self._words = words
        self._next_s = time.monotonic() + _PROGRESS_EVERY_S

    def __call__(self, done: int) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _PROGRESS_EVERY_S
            typer.echo(f"{done:,} {self._words}", err=True)


if __name__ == "__main__":
    app()
