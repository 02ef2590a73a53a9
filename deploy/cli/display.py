"""What a run shows: plain lines without a terminal, one live line with it, and the final table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import typer

from deploy.observe import progress, report


class Display:
    """Shows progress; a context manager, since a live line has to be taken down."""

    def __init__(
        self, every_s: float, *, live: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every_s = every_s
        self._live = sys.stdout.isatty() if live is None else live
        self._clock = clock
        self._last_s = float("-inf")
        self._last_phase = ""
        self._status: Any = None

    def __enter__(self) -> Self:
        if self._live:
            from rich.console import Console

            self._status = Console().status("starting")
            self._status.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.__exit__(kind, error, trace)
            self._status = None

    def show(self, figures: progress.Progress) -> None:
        """Updates the live line, or prints one when it is time or the phase has changed."""
        if self._status is not None:
            self._status.update(progress.line(figures))
            return
        now = self._clock()
        if figures.phase != self._last_phase or now - self._last_s >= self._every_s:
            self._last_s, self._last_phase = now, figures.phase
            self.say(progress.line(figures))

    def say(self, text: str) -> None:
        """One line that stays."""
        if self._status is not None:
            self._status.console.print(text, highlight=False)
            return
        typer.echo(text)
        sys.stdout.flush()


def print_result(summary: dict[str, Any], folder: str) -> None:
    """The table per task, both policies side by side, and where everything lies."""
    typer.echo("")
    typer.echo(report.plain_table(report.table_rows(summary)))
    typer.echo("")
    typer.echo(report.comparison_text(summary))
    typer.echo(report.speed_line(summary))
    for line in [*report.held_out_lines(summary), *report.control_lines(summary)]:
        typer.echo(line)
    samples, groups = summary["samples"], summary["groups"]
    typer.echo("samples: " + ", ".join(f"{count} {name}" for name, count in samples.items()))
    typer.echo("groups:  " + ", ".join(f"{count} {name}" for name, count in groups.items()))
    typer.echo(f"summary: {folder}/summary.json")
