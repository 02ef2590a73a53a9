"""What `kontrast train` does, from configuration to exit code."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from deploy.cli.display import Display, plain, print_result
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
from deploy.observe.writers import check_writers, open_writers
from deploy.resolve import ConfigError
from tasks.errors import UsageError
from tasks.figures import times
from tasks.records import Task


def run_training(
    source: str, overrides: Sequence[str], *, dry_run: bool = False, resume: str = "", rollouts: str = ""
) -> int:
    """One run from its configuration to its exit code; raises KontrastError."""
    config, run = opened(source, overrides, resume, "Name a preset or a TOML file, or a run to --resume.")
    from deploy.cli.stages import needs_tasks, run_stages

    check_writers(config.observe)
    samples = needs_tasks(config)
    if rollouts and (len(config.run.stages) > 1 or not samples):
        raise UsageError("--rollouts trains one stage that samples: name no other in --stages.")
    samples = samples and not rollouts
    if samples:
        check_asked(config)
    if dry_run:
        return print_plan(config)
    tasks = read_tasks(config) if samples else []
    if samples:
        read_held_out(config, tasks)
    run.create()
    run.write_text("config.toml", config.to_toml())
    run.write_json("environment.json", describe_environment())
    if rollouts:
        return train_on_rollouts(prepared(config), run, Path(rollouts))
    return run_stages(prepared(config), run, tasks)


def opened(source: str, overrides: Sequence[str], resume: str, neither: str) -> tuple[Config, RunFolder]:
    """A run's configuration and folder: of the run to resume, else of a new one; ConfigError says `neither`."""
    if resume:
        folder = find_run(Path("runs"), resume)
        return load_config(str(folder / "config.toml"), list(overrides)), RunFolder(folder)
    if source:
        config = load_config(source, list(overrides))
        return config, RunFolder(config.run.folder / new_run_id(config.run.name))
    raise ConfigError(neither)


def check_asked(config: Config) -> None:
    """Raises UsageError unless the configuration names tasks and evaluators."""
    if not config.run.tasks:
        raise UsageError("run.tasks is empty: name tasks, such as --run.tasks procedural:row_norm/0-15.")
    if not config.device_types():
        raise UsageError(
            "evaluator.pool names no evaluator: say how many evaluators of which type, such as cpu = 1 or H100 = 4."
        )


def read_tasks(config: Config) -> list[Task]:
    """The tasks that the selectors name, each content once and each under an id of its own. Raises UsageError."""
    tasks, missing = find_tasks(config)
    if missing:
        raise UsageError("; ".join(missing))
    return tasks


def find_tasks(config: Config) -> tuple[list[Task], list[str]]:
    """The tasks that are at hand, and a sentence for each reason why others are not."""
    from tasks.suites import list_tasks

    found: dict[str, Task] = {}
    missing: dict[str, list[str]] = {}
    for selector in config.run.tasks:
        try:
            for task in list_tasks(selector, size=config.run.size):
                found.setdefault(task.content_hash, task)
        except UsageError as error:
            missing.setdefault(str(error), []).append(selector)
    ids = Counter(task.id for task in found.values())
    tasks = [
        task if ids[task.id] == 1 else task.model_copy(update={"id": f"{task.id}~{task.content_hash[:8]}"})
        for task in found.values()
    ]
    return tasks, [f"{', '.join(selectors)}: {text}" for text, selectors in missing.items()]


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


def print_plan(config: Config) -> int:
    """Prints the resolved tree, the tasks, the placement and all that is missing; 2 when anything is."""
    tasks, missing = find_tasks(config)
    try:
        read_held_out(config, tasks)
    except UsageError as error:
        missing.append(str(error))
    if named_address(config, os.environ):
        with joined(config) as ray:
            nodes = nodes_of(ray)
    else:
        nodes = [local_node()]
    plan = make_plan(requests_of(config), nodes)
    if plan.shortfalls:
        missing.append(shortfall_text(plan))
    typer.echo(config.to_toml())
    named = ", ".join(task.id for task in tasks[:8]) or "none"
    typer.echo(f"# {len(tasks)} tasks: {named}{', ...' if len(tasks) > 8 else ''}")
    typer.echo("# placement")
    for text in plan_text(plan).splitlines():
        typer.echo(f"#   {text}")
    if missing:
        typer.echo("# missing")
        for text in missing:
            typer.echo(f"#   {text}")
    return 2 if missing else 0


def prepared(config: Config) -> Config:
    """The configuration with its model converted and found."""
    from deploy.graph.workers import prepare

    with Display(config.observe.progress_s) as display:
        display.stage("preparing the model (on first use it is converted)")
        return prepare(config)


def train(config: Config, run: RunFolder, tasks: Sequence[Task], make_workers: MakeWorkers) -> int:
    """Runs, shows progress, writes the summary, prints the table; the exit code."""
    followers: list[Follower] = []
    started_s = time.time()
    exporter = exporter_of(config, run)
    settings = config.model_dump(mode="json", by_alias=True)
    with (
        Display(config.observe.progress_s) as display,
        open_writers(config.observe, run.path, run.run_id, settings) as writers,
    ):
        display.say(f"run {run.run_id} in {run.path}")

        def follow(plan: RunPlan, read: Reader) -> Callable[[], object]:
            metrics = RunMetrics() if config.observe.metrics else None
            follower = Follower(run, plan, read, display.show, started_s=started_s, metrics=metrics, writers=writers)
            followers.append(follower)

            def watch() -> None:
                follower.catch_up()
                follower.show()

            return watch

        try:
            execute(config, run, tasks, make_workers, follow, display.stage, read_held_out(config, tasks))
        finally:
            if exporter is not None:
                exporter.stop()
            if followers:
                summary = followers[0].summarize()
    print_result(summary, str(run.path))
    return verdict(config, followers[0], summary)


def train_on_rollouts(config: Config, run: RunFolder, path: Path) -> int:
    """Trains on a file of scored groups and says what became of them; the exit code."""
    from deploy.graph.replaying import STEPS, replay_rollouts

    settings = config.model_dump(mode="json", by_alias=True)
    plain(f"run {run.run_id} in {run.path}")
    with open_writers(config.observe, run.path, run.run_id, settings) as writers:

        def follow(step: int, figures: Mapping[str, float]) -> None:
            writers.write(step, figures)
            shown = ", ".join(f"{name} {figures[name]:.4g}" for name in ("loss", "reward_mean") if name in figures)
            plain(f"step {step}/{config.learner.steps} | {shown}")

        summary = replay_rollouts(config, run, path, plain, follow)
    run.write_json("summary.json", summary)
    fates = ", ".join(f"{count} {fate}" for fate, count in sorted(summary["fates"].items())) or "none used"
    plain(f"{summary['step']} steps on {summary['groups']} groups: {fates}; figures: {run.path / STEPS}")
    return 0


def verdict(config: Config, follower: Follower, summary: dict[str, Any]) -> int:
    """0, or 1 when the run found less than the configuration requires; says which."""
    above = config.run.require_speedup
    if not above:
        return 0
    found = winners(follower.state, above)
    if found:
        typer.echo(f"{len(found)} new kernel(s) beat their reference by more than {times(above)} on fresh seeds.")
        return 0
    best = max(
        (t["best"]["ci_low"] or 0.0 for t in summary["tasks"] if t["best"] and t["best"]["label"] == "new"), default=0.0
    )
    typer.echo(
        f"No new kernel of this run's policy beat its reference with a confirmed interval above {times(above)}"
        + (f"; the best interval began at {times(best)}." if best else ".")
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
