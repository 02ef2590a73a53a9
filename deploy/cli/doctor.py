"""`kontrast doctor`: is everything here that a run needs?"""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def doctor(
    fast: Annotated[
        bool, typer.Option("--fast", help="Skip what takes seconds: importing vLLM and DeepSpeed.")
    ] = False,
) -> None:
    """Check the environment: Python and its headers, compiler, torch, vLLM, DeepSpeed, Redis, sandbox, GPUs.

    Prints one line per check and what to do about each failure. Exit code 0 when a CPU run would work, else 1.
    """
    from deploy.checks import run_checks

    failed = False
    for check in run_checks(fast=fast):
        failed |= check.status == "fail"
        typer.echo(f"{check.status:<5} {check.name}: {check.message}")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    app()
