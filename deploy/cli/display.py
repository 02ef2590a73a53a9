"""What a run shows: plain lines without a terminal, one live line with it, and the final table.

Invariant: while a display is open, no more than 15 s pass between two lines, or the longer interval that was asked for:
a stage that says nothing is named again.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import typer

from deploy.observe import progress, report

SILENCE_S = 12.0
"""Longest silence, where progress comes every 10 s or more often."""


class Display:
    """Shows progress; a context manager, since a live line has to be taken down."""

    def __init__(
        self, every_s: float, *, live: bool | None = None, clock: Callable[[], float] = time.monotonic,
        silence_s: float | None = None,
    ) -> None:  # fmt: skip
        self._every_s = every_s
        self.silence_s = max(SILENCE_S, every_s + 2.0) if silence_s is None else silence_s
        """Silence after which a stage is named again."""
        self._stage, self._stage_s, self._said_s = "starting", clock(), clock()
        self._printing = threading.RLock()
        self._over = threading.Event()
        self._reminder = threading.Thread(target=self._remind, name="display", daemon=True)
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
        self._reminder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._reminder.join()
        if self._status is not None:
            self._status.__exit__(kind, error, trace)
            self._status = None

    def show(self, figures: progress.Progress) -> None:
        """Updates the live line, or prints one when it is time or the phase has changed."""
        now = self._clock()
        if self._stage != figures.phase:
            self._stage, self._stage_s = figures.phase, now
        if self._status is not None:
            self._status.update(progress.line(figures))
            self._said_s = now
            return
        if figures.phase != self._last_phase or now - self._last_s >= self._every_s:
            self._last_s, self._last_phase = now, figures.phase
            self.say(progress.line(figures))

    def stage(self, text: str) -> None:
        """Names what is done from here on; it is named again when nothing else is said for long."""
        self._stage, self._stage_s = text, self._clock()
        if self._status is not None:
            self._status.update(text)
        self.say(text)

    def say(self, text: str) -> None:
        """One line that stays."""
        with self._printing:
            self._said_s = self._clock()
            if self._status is not None:
                self._status.console.print(text, highlight=False)
                return
            plain(text)

    def _remind(self) -> None:
        while not self._over.wait(self.silence_s / 12):
            if self._clock() - self._said_s >= self.silence_s:
                self.say(f"{self._stage}: {self._clock() - self._stage_s:.0f} s so far")


def plain(text: str) -> None:
    """A line on standard output, at once."""
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
