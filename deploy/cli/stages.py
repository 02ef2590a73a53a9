"""The stages of training, and a run of several of them.

Invariants: a stage begins with the weights that the one before ended with; a finished stage is never run again, and a
killed one goes on; each stage of several has its own folder in the run's, all have one exemplar store.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.cli.display import plain
from deploy.config import Config
from deploy.folder import RunFolder
from deploy.resolve import merge, validate
from tasks.errors import UsageError
from tasks.figures import figures, interval
from tasks.records import Task

DONE = "done.json"
"""File of a stage's folder that says how it ended; written last."""
STAGE_CONFIG = "stage.toml"
"""The configuration that a stage ran with: the run's, with the weights it began from."""
POLICY = "policy"
"""Folder of what a stage hands on: an adapter, or a model where every weight is trained."""

Runner = Callable[[Config, RunFolder, Sequence[Task]], int]
"""Runs a stage to its end or to where it was stopped; returns its exit code."""


@dataclass(frozen=True)
class Stage:
    """One kind of training."""

    run: Runner
    samples: bool = True
    """Whether it draws samples, for which it needs tasks and evaluators."""
    learner: str = ""
    """What `learner.stage` is in it; empty for what the configuration says."""


def loop(config: Config, folder: RunFolder, tasks: Sequence[Task]) -> int:
    """A stage that samples, evaluates and learns."""
    from deploy.cli.session import train
    from deploy.graph.workers import make_workers

    return train(config, folder, tasks, make_workers)


def supervised(config: Config, folder: RunFolder, tasks: Sequence[Task]) -> int:  # noqa: ARG001
    """Stage 1."""
    from deploy.graph.tuning import CURVE, Curve, tune
    from deploy.observe.writers import open_writers

    last_s = -math.inf
    # A resumed stage writes steps beyond its checkpoint again, with equal figures.
    known = sum(1 for _ in Curve(folder.path / CURVE).fresh())
    settings = config.model_dump(mode="json", by_alias=True)
    writers = open_writers(config.observe, folder.path, folder.run_id, settings)

    def follow(line: dict[str, Any]) -> None:
        nonlocal last_s
        now = time.monotonic()
        if line["step"] >= known:
            writers.write(line["step"] + 1, line)
        if now - last_s >= config.observe.progress_s or line["held_out_loss"] is not None:
            last_s = now
            plain(curve_line(line, config.learner.sft.steps))

    with writers:
        report = tune(config, folder, plain, follow)
    perplexity = report["held_out_perplexity"]
    plain(
        f"stage sft: {report['steps']} steps on {report['pairs']} pairs, loss "
        + interval(report["first_loss"], report["last_loss"])
        + ("" if perplexity is None else f", held-out perplexity {figures(perplexity)}")
        + f"; curve: {folder.path / 'sft.jsonl'}"
    )
    return 0


def curve_line(line: dict[str, Any], steps: int) -> str:
    """One line of the loss curve for people."""
    held_out = line["held_out_loss"]
    return (
        f"sft step {line['step'] + 1}/{steps} | loss {line['loss']:.4f}"
        + ("" if held_out is None else f" | held-out perplexity {math.exp(held_out):.3f}")
        + f" | {line['tokens_per_s']:.0f} tokens/s"
    )


STAGES: dict[str, Stage] = {
    "sft": Stage(supervised, samples=False),
    "self_supervised": Stage(loop, learner="self_supervised"),
    "contrastive": Stage(loop, learner="contrastive"),
    "frozen": Stage(loop, learner="frozen"),
    "rl": Stage(loop),
}
"""Every stage by the name that `run.stages` calls it."""


def needs_tasks(config: Config) -> bool:
    """Whether any stage draws samples. Raises UsageError for stages that cannot be run."""
    names = config.run.stages
    for name in names:
        if name not in STAGES:
            raise UsageError(f"there is no stage {name!r} (run.stages): the stages are {', '.join(STAGES)}.")
    if not names or len(set(names)) != len(names):
        raise UsageError(f"run.stages = {', '.join(names) or 'nothing'}: name one or more stages, each once.")
    for name in names:
        config_of(config, name)
    return any(STAGES[name].samples for name in names)


def run_stages(config: Config, run: RunFolder, tasks: Sequence[Task]) -> int:
    """Runs the stages that are not finished, in order; the last one's exit code, or that of the one that stopped."""
    code = 0
    for name in config.run.stages:
        folder = folder_of(config, run, name)
        last = name == config.run.stages[-1]
        known = _ended(folder)
        if known is None:
            if folder is not run:
                folder.create()
                folder.write_text(STAGE_CONFIG, config.to_toml())
                plain(f"stage {name} in {folder.path}")
            code = STAGES[name].run(config_of(config, name), folder, tasks)
            if folder is run or not finished(name, folder):
                return code
            if not last or not STAGES[name].samples:
                hand_on(config, folder)
            folder.write_json(DONE, {"exit_code": code})
        else:
            code = known
        if not last:
            config = with_weights(config, folder)
    return code


def config_of(config: Config, name: str) -> Config:
    """The configuration of a stage. Raises ConfigError when it contradicts itself there."""
    if not STAGES[name].learner:
        return config
    tree = merge(config.model_dump(by_alias=True), {"learner": {"stage": STAGES[name].learner}})
    return validate(Config, tree, f"of stage {name}")


def folder_of(config: Config, run: RunFolder, name: str) -> RunFolder:
    """Where a stage lies: a run of one stage that samples is its own folder."""
    return run if config.run.stages == (name,) and STAGES[name].samples else run.stage(name)


def finished(name: str, folder: RunFolder) -> bool:
    """Whether a stage that has just returned is at its end, and was not asked to stop."""
    if not STAGES[name].samples:
        return True
    status: str = json.loads((folder.path / "summary.json").read_text())["status"]
    return status == "finished"


def hand_on(config: Config, folder: RunFolder) -> None:
    """Writes what the next stage begins with, in the format that was trained in."""
    from learner.checkpoint import CheckpointFolder
    from learner.export import export_policy

    if not (folder.path / POLICY).is_dir():
        found = CheckpointFolder(folder.checkpoints, keep=config.learner.checkpoint.keep).latest()
        export_policy(
            config.learner.policy, None if found is None else found.folder, folder.path / POLICY,
            "adapter" if trains_adapter(config) else "merged", seed=seed_of(config, folder.path.name),
        )  # fmt: skip


def trains_adapter(config: Config) -> bool:
    """Whether the policy's own weights stay and an adapter is trained."""
    return bool(config.learner.policy.lora_rank or config.learner.policy.adapter)


def seed_of(config: Config, name: str) -> int:
    """What a fresh adapter of a stage follows from."""
    return config.learner.sft.data.seed if name == "sft" else config.run.seed


def with_weights(config: Config, folder: RunFolder) -> Config:
    """The configuration with the policy of a finished stage in it."""
    handed = str((folder.path / POLICY).resolve())
    learner, rollout = config.learner, config.rollout
    if trains_adapter(config):
        policy = learner.policy.model_copy(update={"adapter": handed})
    else:
        policy = learner.policy.model_copy(update={"model": handed})
        rollout = rollout.model_copy(update={"model": handed})
    return config.model_copy(update={"rollout": rollout, "learner": learner.model_copy(update={"policy": policy})})


def _ended(folder: RunFolder) -> int | None:
    """Exit code of a finished stage; None for one that is not."""
    path = folder.path / DONE
    return int(json.loads(path.read_text())["exit_code"]) if path.is_file() else None
