"""`kontrast augment`: verified kernels of other models, for supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.settings import SettingsCommand, settings_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=SettingsCommand)
def augment(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(help="A preset or a TOML file with [augment] and run.tasks.", show_default=False)
    ] = "",
    resume: Annotated[
        str, typer.Option("--resume", help="Id or folder of an augmentation to go on with.", show_default=False)
    ] = "",
) -> None:
    """Have teachers write kernels for the run's tasks, evaluate them, and keep what is accepted.

    Writes demonstrations.jsonl in the run's folder, for kontrast train --stages sft. Can be ended at any moment; with
    --resume nothing that was answered is asked again. Settings are overridden by --section.key value. Ends with exit
    code 0 when every teacher is through, 2 for bad usage, 3 when a teacher or evaluator was lost or the limit of the
    costs was reached.
    """
    from deploy.cli.augmentation import run_augmentation

    raise typer.Exit(run_augmentation(config, settings_of(context), resume=resume))


if __name__ == "__main__":
    app()
