"""Commands that take `--section.key value` beside their own options.

Invariant: a setting's value is never taken for an argument of the command, wherever it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand


class SettingsCommand(TyperCommand):
    """A command that finds the settings in its context's `args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keeps the settings away from the parser, which would take their values for arguments."""
        own, settings = split_settings(args)
        super().parse_args(ctx, own)
        ctx.args = [*ctx.args, *settings]
        return list(ctx.args)


def split_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and the settings with their values."""
    own: list[str] = []
    settings: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            own.append(word)
            continue
        settings.append(word)
        if not equals and left:
            settings.append(left.pop(0))
    return own, settings
