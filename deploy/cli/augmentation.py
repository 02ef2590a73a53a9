"""What `kontrast augment` does, from configuration to exit code.

Layout of its folder: `config.toml`, `environment.json`, `journal.jsonl` (every answer and verdict),
`demonstrations.jsonl` (what is kept, made from the journal), `summary.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from deploy.augment.augmenter import Augmenter, Evaluate, Imported
from deploy.augment.imports import DEMONSTRATIONS, read_set
from deploy.augment.journal import Entry, Journal, Judged, not_written
from deploy.augment.state import AugmentState, summarize
from deploy.augment.teachers import Teacher, open_teacher
from deploy.cli.display import plain
from deploy.config import Config
from deploy.folder import RunFolder, new_run_id
from deploy.graph.waits import within
from deploy.observe.environment import describe_environment
from tasks.errors import UsageError
from tasks.records import Candidate, Evaluation, Task

_log = logging.getLogger(__name__)
JOURNAL = "journal.jsonl"
LOST = 3
"""Exit code when the work is not finished, for want of a teacher, an evaluator or money."""


class OpenEvaluators(Protocol):
    """Opens the evaluators of a configuration."""

    def __call__(self, config: Config, device_type: str) -> AbstractContextManager[Evaluate]: ...


def run_augmentation(source: str, overrides: Sequence[str], *, resume: str = "") -> int:
    """One augmentation from its configuration to its exit code; raises KontrastError."""
    from deploy.cli.session import opened, read_tasks

    neither = "Name a TOML file with [augment], or an augmentation to --resume."
    config, run = opened(source, overrides, resume, neither)
    device_type = check(config)
    tasks = read_tasks(config) if config.run.tasks else []
    skipped: Counter[str] = Counter()
    imports = read_imports(config, device_type, skipped)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        run.write_text("config.toml", config.to_toml())
        run.write_json("environment.json", describe_environment())
    except OSError as error:
        raise UsageError(f"{run.path} cannot be written ({error.strerror}): set run.folder.") from error
    plain(f"run {run.run_id} in {run.path}")
    for reason, count in sorted(skipped.items()):
        plain(f"left out of the imports: {count:,} with {reason}")
    with Journal(run.path / JOURNAL) as journal:
        try:
            return augment(config, run, tasks, imports, journal, open_evaluators, device_type=device_type)
        except OSError as error:
            raise not_written(run.path, error) from error


def check(config: Config) -> str:
    """The device type to evaluate on. Raises UsageError for a configuration without work or evaluators."""
    augment = config.augment
    if not augment.teachers and not augment.imports:
        raise UsageError("augment has no teachers and no imports: name a teacher in [augment.teachers.NAME].")
    if augment.teachers and not config.run.tasks:
        raise UsageError("run.tasks is empty: name tasks, such as --run.tasks procedural:row_norm/0-15.")
    types = list(config.device_types())
    if len(types) != 1:
        named = f"names {', '.join(types)}" if types else "names no evaluator"
        raise UsageError(f"evaluator.pool {named}: an augmentation is evaluated on one type, such as cpu = 1.")
    return types[0]


def read_imports(config: Config, device_type: str, skipped: Counter[str]) -> list[Imported]:
    """The kernels of all sets to import."""
    from tasks.suites import load_task

    load = partial(load_task, size=config.run.size)
    return [kernel for path in config.augment.imports for kernel in read_set(path, device_type, load, skipped)]


def augment(
    config: Config, run: RunFolder, tasks: Sequence[Task], imports: Sequence[Imported], journal: Journal,
    open_evaluators: OpenEvaluators, *, device_type: str,
) -> int:  # fmt: skip
    """Goes on from the journal to the end; the exit code."""
    state = AugmentState.replay(journal.entries)
    write_demonstrations(run, state)
    note = partial(_note, journal, run.path / DEMONSTRATIONS)
    try:
        with open_evaluators(config, device_type) as evaluate:
            lost = asyncio.run(_augment(config, tasks, imports, state, note, evaluate, device_type))
    except KeyboardInterrupt:
        plain(f"Stopped: go on with kontrast augment --resume {run.run_id}")
        return LOST
    finally:
        write_demonstrations(run, state)
        summary = summarize(state, tasks)
        run.write_json("summary.json", summary)
    print_summary(summary, run)
    for name, reason in lost.items():
        plain(f"teacher {name} was lost: {reason}")
    spent = 0 < config.augment.max_cost <= state.cost
    if spent:
        plain(f"The answers have cost {state.cost:.2f}, and augment.max_cost = {config.augment.max_cost:g}.")
    if lost or spent:
        plain(f"Go on with kontrast augment --resume {run.run_id}")
    return LOST if lost or spent else 0


async def _augment(
    config: Config, tasks: Sequence[Task], imports: Sequence[Imported], state: AugmentState, note: Any,
    evaluate: Evaluate, device_type: str,
) -> Mapping[str, str]:  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        teachers: dict[str, Teacher] = {}
        for name, teacher in config.augment.teachers.items():
            teachers[name] = open_teacher(name, teacher, config, device_type)
            stack.push_async_callback(teachers[name].close)
        augmenter = Augmenter(tasks, teachers, evaluate, config.augment, state, note, device_type=device_type)
        progress = asyncio.create_task(_progress(augmenter, config.observe.progress_s))
        stack.callback(progress.cancel)
        await augmenter.run(imports)
        return augmenter.lost


async def _progress(augmenter: Augmenter, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        state = augmenter.state
        counts = Counter(judged.verdict for pair in state.pairs.values() for judged in pair.verdicts.values())
        words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())) or "nothing judged yet"
        plain(f"{words} | {augmenter.left()} pairs of teacher and task left | cost {state.cost:.2f}")


def _note(journal: Journal, kept: Path, entry: Entry) -> None:
    """Into the journal first; the file of demonstrations follows from it and is made anew at each start."""
    journal.append(entry)
    if isinstance(entry, Judged) and entry.demonstration is not None:
        with kept.open("a") as file:
            file.write(entry.demonstration.to_json() + "\n")


def write_demonstrations(run: RunFolder, state: AugmentState) -> None:
    """All that is kept, in its order, as one file."""
    run.write_text(DEMONSTRATIONS, "".join(one.to_json() + "\n" for one in state.demonstrations()))


def print_summary(summary: Mapping[str, Any], run: RunFolder) -> None:
    """A row for each teacher and where everything lies."""
    from deploy.observe.report import plain_table

    rows: list[tuple[str, ...]] = [("teacher", "answers", "accepted", "tasks", "verdicts", "tokens in/out", "cost")]
    for name, one in summary["teachers"].items():
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(one["verdicts"].items()))
        rows.append(
            (name, str(one["answers"]), str(one["verdicts"].get("accepted", 0)), str(one["tasks_with_success"]),
             verdicts or "-", f"{one['prompt_tokens']}/{one['new_tokens']}", f"{one['cost']:.2f}")
        )  # fmt: skip
    plain(plain_table(rows))
    if summary["skipped"]:
        plain("skipped tasks: " + json.dumps(summary["skipped"], sort_keys=True))
    plain(f"{summary['kept']} demonstrations of {summary['tasks_with_success']} tasks: {run.path / DEMONSTRATIONS}")


@contextmanager
def open_evaluators(config: Config, device_type: str) -> Iterator[Evaluate]:
    """The evaluators as actors, on the cluster or on this machine."""
    from deploy.graph.cluster import joined, nodes_of, requests_of
    from deploy.graph.evaluators import EvaluatorPool, open_evaluator, start_evaluators
    from deploy.graph.placement import make_plan
    from tasks.integrity import check_integrity

    cluster = config.cluster
    with joined(config) as ray:
        needed = [request for request in requests_of(config) if request.role == "evaluator"]
        make_plan(needed, nodes_of(ray)).require()
        names = {
            device_type: [f"augment/{new_run_id('evaluator')}-{n}" for n in range(config.device_types()[device_type])]
        }
        actors = start_evaluators(
            ray, names, check_integrity(),
            lambda kind: open_evaluator(config.evaluator, "cpu" if kind == "cpu" else "cuda"),
            cpus=cluster.evaluator_cpus, gpus=cluster.evaluator_gpus, restarts=cluster.restarts,
        )  # fmt: skip
        try:
            pool = EvaluatorPool(actors, attempts=cluster.attempts)
            # The limit of an evaluation counts its wait for the device: the long queue is in front of it.
            slots = asyncio.Semaphore(2 * len(actors[device_type]))

            async def evaluate(task: Task, candidate: Candidate) -> Evaluation:
                async with slots:
                    return await within(
                        pool.evaluate(task, candidate, device_type, config.evaluator.protocol),
                        cluster.evaluate_timeout_s, "an evaluation", "evaluate",
                    )  # fmt: skip

            yield evaluate
        finally:
            for actor in actors[device_type]:
                ray.kill(actor)
