"""`kontrast train`: a training run from a preset or a TOML file."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.settings import SettingsCommand, settings_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=SettingsCommand)
def train(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(help="A preset (demo, one-gpu, cluster) or a TOML file.", show_default=False)
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and who would run where, then stop.")
    ] = False,
    resume: Annotated[
        str, typer.Option("--resume", help="Id or folder of a run to go on with.", show_default=False)
    ] = "",
    stages: Annotated[
        str, typer.Option("--stages", help="Stages in their order, such as sft,rl.", show_default=False)
    ] = "",
    rollouts: Annotated[
        str,
        typer.Option(
            "--rollouts",
            help="Train on this file, which run.dump_rollouts wrote, without generators.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Train a policy. Settings of the configuration are overridden by --section.key value.

    Stages: sft (supervised, on seed kernels and demonstrations), self_supervised, contrastive, frozen, and rl (what
    learner.stage says). Each begins with the weights of the one before.

    Joins the Ray cluster that RAY_ADDRESS or `ray job submit` names, else starts Ray on this machine. Ends with exit
    code 0 when the run is finished, 1 when it found less than run.require_speedup asks, 2 for bad usage, 3 when an
    actor, the store or the cluster did not answer in time.
    """
    from deploy.cli.session import run_training

    overrides = [*settings_of(context), *(["--run.stages", stages] if stages else [])]
    raise typer.Exit(run_training(config, overrides, dry_run=dry_run, resume=resume, rollouts=rollouts))


if __name__ == "__main__":
    app()
