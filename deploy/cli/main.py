"""The `kontrast` command: a table of subcommands, each in a module of its own that is imported when it is used.

Invariants: nothing heavy is imported to print help; an error from outside is one sentence on stderr and an exit code,
never a traceback; the packages are checked to come from one root before anything else runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from deploy import quiet
from tasks.errors import KontrastError
from tasks.integrity import check_one_root
from tasks.version import EVALUATOR_VERSION, PACKAGE_VERSION, RECORD_SCHEMA_VERSION

COMMANDS = {
    "evaluate": "deploy.cli.evaluate",
    "augment": "deploy.cli.augment",
    "train": "deploy.cli.train",
    "export": "deploy.cli.export",
    "store": "deploy.cli.store",
    "doctor": "deploy.cli.doctor",
}
"""Subcommand -> module with `app`, a typer application of one command or several; heavy imports are inside only."""


class LazyGroup(TyperGroup):
    """Subcommands by name; a module is imported when its command, or the list of all, is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - click's signature
        """Names in the order of the table."""
        return [name for name, module in COMMANDS.items() if importlib.util.find_spec(module) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any | None:  # noqa: ARG002
        """The command by name, or None."""
        module = COMMANDS.get(cmd_name)
        if module is None or importlib.util.find_spec(module) is None:
            return None
        command = typer.main.get_command(importlib.import_module(module).app)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="kontrast",
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version_text() -> str:
    """The three versions that every record carries."""
    return f"kontrast {PACKAGE_VERSION}, evaluator {EVALUATOR_VERSION}, record schema {RECORD_SCHEMA_VERSION}"


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(version_text())
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[  # noqa: ARG001 - its callback answers
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, on stderr.")] = False,
) -> None:
    """Trains language models to write fast kernels, and measures kernels honestly."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def main() -> NoReturn:
    """Entry point of the console script."""
    quiet.usage_reporting_off(os.environ)
    try:
        check_one_root()
        app(prog_name="kontrast")
    except KontrastError as error:
        typer.echo(f"kontrast: {error}", err=True)
        sys.exit(error.exit_code)
    sys.exit(0)


if __name__ == "__main__":
    main()
