"""`kontrast export`: a run's policy as a folder that `transformers` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="Id or folder of a run.")],
    out: Annotated[Path, typer.Argument(help="New folder to write.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="The whole model, with the adapter merged in fp32 and cast once.")
    ] = False,
    stage: Annotated[
        str, typer.Option("--stage", help="The stage whose policy it is; default: the last with a checkpoint.")
    ] = "",
    dtype: Annotated[
        str, typer.Option("--dtype", help="bf16 or fp32; default: as it was trained.", show_default=False)
    ] = "",
) -> None:
    """Write the policy of a run's latest checkpoint: its adapter, or with --merged the whole model.

    The run may still be going on, or have been killed. The folder has the tokenizer in it; an adapter names the base
    model's folder.
    """
    from deploy.cli.exporting import run_export

    typer.echo(run_export(run, out, merged=merged, stage=stage, dtype=dtype))


if __name__ == "__main__":
    app()
