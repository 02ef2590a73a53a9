"""Settings of the configuration among a command's own options: `--section.key value`, wherever they stand.

Invariant: what is no setting goes on to the parser, which knows the command's options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

_KEY = "settings"


def split_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The settings and the other words, each in order; after `--` nothing is a setting.

    A setting without a value stands alone, so that whoever reads it can say so.
    """
    settings: list[str] = []
    others: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            return settings, [*others, word, *words]
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            others.append(word)
            continue
        settings.append(word)
        if not equals and words and not words[0].startswith("--"):
            settings.append(words.pop(0))
    return settings, others


class SettingsCommand(TyperCommand):
    """A command that takes settings; it finds them with `settings_of`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes the settings out before the parser sees the rest."""
        ctx.meta[_KEY], others = split_settings(args)
        return super().parse_args(ctx, others)


def settings_of(context: Any) -> list[str]:
    """The words of the command line's settings."""
    return list(context.meta[_KEY])
