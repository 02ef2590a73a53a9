"""What `kontrast train` does, from configuration to exit code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from deploy.cli.display import Display, print_result
from deploy.config import Config, load_config
from deploy.folder import RunFolder, find_run, new_run_id
from deploy.graph.cluster import joined, local_node, named_address, nodes_of, requests_of
from deploy.graph.placement import make_plan, plan_text, shortfall_text
from deploy.graph.plan import RunPlan
from deploy.graph.run import MakeWorkers, Reader, execute
from deploy.observe.environment import describe_environment
from deploy.observe.export import Exporter, RunMetrics
from deploy.observe.follow import Follower
from deploy.observe.report import winners
from deploy.resolve import ConfigError
from tasks.errors import UsageError
from tasks.records import Task


def run_training(source: str, overrides: Sequence[str], *, dry_run: bool = False, resume: str = "") -> int:
    """One run from its configuration to its exit code; raises KontrastError."""
    if resume:
        folder = find_run(Path("runs"), resume)
        config = load_config(str(folder / "config.toml"), list(overrides))
        run = RunFolder(folder)
    elif source:
        config = load_config(source, list(overrides))
        run = RunFolder(config.run.folder / new_run_id(config.run.name))
    else:
        raise ConfigError("Name a preset or a TOML file, or a run to --resume.")
    tasks = read_tasks(config)
    if dry_run:
        return print_plan(config, tasks)
    run.create()
    run.write_text("config.toml", config.to_toml())
    run.write_json("environment.json", describe_environment())
    from deploy.graph.workers import make_workers, prepare

    prepared = prepare(config)
    return train(prepared, run, tasks, make_workers)


def read_tasks(config: Config) -> list[Task]:
    """The tasks that the selectors name, each once; raises UsageError also for what is wrong with the held-out sets."""
    from tasks.suites import list_tasks

    if not config.run.tasks:
        raise UsageError("run.tasks is empty: name tasks, such as --run.tasks procedural:row_norm/0-15.")
    if not config.device_types():
        raise UsageError(
            "evaluator.pool names no evaluator: say how many evaluators of which type, such as cpu = 1 or H100 = 4."
        )
    found: dict[str, Task] = {}
    for selector in config.run.tasks:
        for task in list_tasks(selector, size=config.run.size):
            found.setdefault(task.id, task)
    read_held_out(config, list(found.values()))
    return list(found.values())


def read_held_out(config: Config, tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """The tasks of each held-out set; raises UsageError for one that is trained on as well."""
    from tasks.suites import list_tasks

    if not config.held_out.eval_every:
        return {}
    trained = {task.content_hash: task.id for task in tasks}
    found = {}
    for name, selectors in config.held_out.sets.items():
        named = {task.id: task for task in list_tasks(selectors, size=config.run.size)}
        both = next((task for task in named.values() if task.content_hash in trained), None)
        if both is not None:
            raise UsageError(
                f"{both.id} of held_out.sets.{name} is trained on as {trained[both.content_hash]}: take it out of "
                f"held_out.sets or of run.tasks."
            )
        found[name] = list(named.values())
    return found


def print_plan(config: Config, tasks: Sequence[Task]) -> int:
    """Prints the resolved tree and the placement; 2 when the cluster lacks something."""
    if named_address(config, os.environ):
        with joined(config) as ray:
            nodes = nodes_of(ray)
    else:
        nodes = [local_node()]
    plan = make_plan(requests_of(config), nodes)
    typer.echo(config.to_toml())
    typer.echo(f"# {len(tasks)} tasks: {', '.join(task.id for task in tasks[:8])}{', ...' if len(tasks) > 8 else ''}")
    typer.echo("# placement")
    for text in plan_text(plan).splitlines():
        typer.echo(f"#   {text}")
    if plan.shortfalls:
        typer.echo(f"# {shortfall_text(plan)}")
        return 2
    return 0


def train(config: Config, run: RunFolder, tasks: Sequence[Task], make_workers: MakeWorkers) -> int:
    """Runs, shows progress, writes the summary, prints the table; the exit code."""
    followers: list[Follower] = []
    started_s = time.time()
    exporter = exporter_of(config, run)
    with Display(config.observe.progress_s) as display:
        display.say(f"run {run.run_id} in {run.path}")

        def follow(plan: RunPlan, read: Reader) -> Callable[[], object]:
            metrics = RunMetrics() if config.observe.metrics else None
            follower = Follower(run, plan, read, display.show, started_s=started_s, metrics=metrics)
            followers.append(follower)

            def watch() -> None:
                follower.catch_up()
                follower.show()

            return watch

        try:
            execute(config, run, tasks, make_workers, follow, display.say, read_held_out(config, tasks))
        finally:
            if exporter is not None:
                exporter.stop()
            if followers:
                summary = followers[0].summarize()
    print_result(summary, str(run.path))
    return verdict(config, followers[0], summary)


def verdict(config: Config, follower: Follower, summary: dict[str, Any]) -> int:
    """0, or 1 when the run found less than the configuration requires; says which."""
    above = config.run.require_speedup
    if not above:
        return 0
    found = winners(follower.state, above)
    if found:
        typer.echo(f"{len(found)} new kernel(s) beat their reference by more than {above:g}x on fresh seeds.")
        return 0
    best = max(
        (t["best"]["ci_low"] or 0.0 for t in summary["tasks"] if t["best"] and t["best"]["label"] == "new"), default=0.0
    )
    typer.echo(
        f"No new kernel of this run's policy beat its reference with a confirmed interval above {above:g}x"
        + (f"; the best interval began at {best:.2f}x." if best else ".")
    )
    return 1


def exporter_of(config: Config, run: RunFolder) -> Exporter | None:
    """The running metrics server; None where the configuration asks for none."""
    if not config.observe.metrics:
        return None
    exporter = Exporter(run.path / "metrics", "run", host=config.observe.metrics_host, port=config.observe.metrics_port)
    try:
        return exporter.start()
    except OSError as error:
        place = f"{config.observe.metrics_host}:{config.observe.metrics_port}"
        raise UsageError(
            f"Metrics cannot be served at {place} ({error.strerror}): set observe.metrics_port."
        ) from error
