"""What a family of generated tasks is, and the deterministic draws it is made with.

Invariants: a task is a pure function of (family, index, size); the two sizes of one index combine the same sub-skills;
draws come from SHA-256 alone, so they are equal on every platform and Python version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Size = Literal["cpu", "gpu"]
T = TypeVar("T")


class Draw:
    """A stream of reproducible choices for one key."""

    def __init__(self, *key: str | int) -> None:
        self._key = "/".join(str(part) for part in key)
        self._count = 0

    def integer(self, low: int, high: int) -> int:
        """A whole number in [low, high], both included; the bias of the 64-bit remainder is below 1e-12 here."""
        self._count += 1
        block = hashlib.sha256(f"{self._key}#{self._count}".encode()).digest()
        return low + int.from_bytes(block[:8], "big") % (high - low + 1)

    def choice(self, options: Sequence[T]) -> T:
        """One of the options, each equally likely."""
        return options[self.integer(0, len(options) - 1)]

    def several(self, options: Sequence[T], count: int) -> list[T]:
        """Up to `count` different options, in their order, each subset equally likely."""
        left = list(range(len(options)))
        chosen = [left.pop(self.integer(0, len(left) - 1)) for _ in range(min(count, len(left)))]
        return [options[place] for place in sorted(chosen)]

    def tenths(self, low: int, high: int) -> str:
        """A decimal with one digit after the point, as source text: `tenths(3, 9)` is one of 0.3 ... 0.9."""
        return f"{self.integer(low, high) / 10:.1f}"


@dataclass(frozen=True)
class Spec:
    """One drawn task: its reference, and what the family's seed templates are filled with."""

    kind: str
    """Which of the family's references it is; a seed template may be for some kinds only."""
    skills: tuple[str, ...]
    """Sub-skills that the reference combines."""
    source: str
    width: int
    """Elements in one row of what a blocked kernel splits; turns a block size in KiB into rows."""
    slots: Mapping[str, str] = field(default_factory=dict)
    """Text for the `${name}` of the templates; several lines take the indentation of the placeholder."""


@dataclass(frozen=True)
class Family:
    """A named source of generated tasks. `draw` must use nothing but its arguments."""

    name: str
    summary: str
    draw: Callable[[Draw, Size], Spec]
    held_out: bool = False
    """A held-out family is never trained on and has no seed kernels."""


def reference_source(
    arguments: str, lines: Sequence[str], inputs: Sequence[str], *, result: str = "x", init: Sequence[str] = (),
    init_arguments: str = "", init_lines: Sequence[str] = (),
) -> str:  # fmt: skip
    """Source of a reference in KernelBench's convention, with as few tokens as it needs.

    `lines` are the statements of `forward`, without indentation; the last one, when it assigns `result`, becomes the
    return statement. `inputs` and `init` are expressions.
    """
    body = list(lines)
    prefix = f"{result} = "
    if body[-1].startswith(prefix):
        body[-1] = "return " + body[-1].removeprefix(prefix)
    else:
        body.append(f"return {result}")
    constructor = ""
    if init_lines:
        statements = indented(["super().__init__()", *init_lines], 8)
        constructor = f"    def __init__(self, {init_arguments}):\n{statements}\n"
    return (
        f"import torch\n\nclass Model(torch.nn.Module):\n{constructor}    def forward(self, {arguments}):\n"
        f"{indented(body, 8)}\n\ndef get_inputs():\n    return [{', '.join(inputs)}]\n\n"
        f"def get_init_inputs():\n    return [{', '.join(init)}]\n"
    )


def indented(lines: Sequence[str], spaces: int) -> str:
    """The lines joined, each behind that many spaces."""
    return "\n".join(" " * spaces + line for line in lines)


def rows_for(elements: float, width: int, multiple: int = 32) -> int:
    """Rows of `width` that hold about `elements`, a positive multiple of `multiple`."""
    return max(1, round(elements / width / multiple)) * multiple
