"""The `kontrast` command: a table of subcommands, each in a module of its own that is imported when it is used.

Invariants: nothing heavy is imported to print help; an error from outside is one sentence on stderr and an exit code,
never a traceback, and beside it one object on stdout where `kontrast evaluate --json` promises one; the packages are
checked to come from one root before anything else runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

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


def log_to_stderr(*, verbose: bool) -> None:
    """Sets what is logged; a command's own `-v` counts as much as one before it."""
    if verbose:
        logging.getLogger().setLevel(logging.INFO)


@app.callback()
def root(
    version: Annotated[  # noqa: ARG001 - its callback answers
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, on stderr.")] = False,
) -> None:
    """Trains language models to write fast kernels, and measures kernels honestly."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    log_to_stderr(verbose=verbose)


def promises_object(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for exactly one JSON object on stdout, whatever else is wrong with it."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "evaluate" in options and "--json" in options


def _tell_object(error: str, exit_code: int) -> None:
    """The object of a command line that could not be served."""
    if promises_object(sys.argv[1:]):
        typer.echo(json.dumps({"error": " ".join(error.split()), "exit_code": exit_code}))


def main() -> NoReturn:
    """Entry point of the console script."""
    quiet.usage_reporting_off(os.environ)
    try:
        check_one_root()
        code = app(prog_name="kontrast", standalone_mode=False)
    except KontrastError as error:
        typer.echo(f"kontrast: {error}", err=True)
        _tell_object(str(error), error.exit_code)
        sys.exit(error.exit_code)
    except TyperException as error:
        error.show()  # type: ignore[attr-defined]  # all that a parser raises can
        _tell_object(error.format_message(), error.exit_code)
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(1)
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
