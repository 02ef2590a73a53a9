"""What `kontrast export` does: finds the checkpoint of a run and the policy's settings, and has it written."""

from __future__ import annotations

from pathlib import Path

from deploy.cli.stages import STAGE_CONFIG, STAGES, folder_of, needs_tasks, seed_of, trains_adapter
from deploy.config import Config, load_config
from deploy.folder import RunFolder, find_run
from deploy.graph.workers import prepare
from learner.checkpoint import Checkpoint, CheckpointFolder
from learner.export import Kind, export_policy
from tasks.errors import UsageError


def run_export(run: str, out: Path, *, merged: bool = False, stage: str = "", dtype: str = "") -> str:
    """Exports; returns a line that says what lies where. Raises KontrastError."""
    if dtype not in ("", "bf16", "fp32"):
        raise UsageError(f"--dtype {dtype} is unknown: give bf16 or fp32.")
    folder = RunFolder(find_run(Path("runs"), run))
    config = load_config(str(folder.path / "config.toml"))
    needs_tasks(config)
    name, found = find_checkpoint(config, folder, stage)
    own = folder_of(config, folder, name).path / STAGE_CONFIG
    config = prepare(load_config(str(own)) if own.is_file() else config)
    kind: Kind = "merged" if merged or not trains_adapter(config) else "adapter"
    export_policy(
        config.learner.policy, found.folder, out, kind, seed=seed_of(config, name), dtype=dtype
    )  # fmt: skip
    return f"{kind} of stage {name}, step {found.state.version.step}: {out}"


def find_checkpoint(config: Config, run: RunFolder, stage: str) -> tuple[str, Checkpoint]:
    """The latest checkpoint of a stage, or of the last stage that has one, with the stage's name.

    Reads only: the checkpoint that a living learner is writing stays untouched.
    """
    if stage and stage not in config.run.stages:
        known = ", ".join(name for name in config.run.stages if name in STAGES)
        raise UsageError(f"{run.run_id} has no stage {stage!r}: its stages are {known}.")
    for name in [stage] if stage else reversed(config.run.stages):
        found = CheckpointFolder(folder_of(config, run, name).checkpoints, keep=1).peek()
        if found is not None:
            return name, found
    raise UsageError(f"{run.run_id} has no checkpoint{f' of stage {stage}' if stage else ''} yet: go on with --resume.")
