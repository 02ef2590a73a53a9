"""Seed kernels: verified ways to solve a generated task, rendered from data files with a free parameter.

`seeds/<family>/<name>.py.txt` is a TOML header, a line `---`, and the kernel's text with `${slot}` placeholders. The
header says `sizes`, `style`, `speed`, `reason`, optionally `kinds`, and `[parameter]` with `name`, `values` and `unit`.

Invariants: a seed is right for every task of its family (and kinds); it keeps nothing between calls, changes no input
and returns memory of its own; held-out families have none.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from tasks.procedural.family import Draw, Size, Spec

Speed = Literal["slow", "middle", "fast"]
SPEEDS: tuple[Speed, ...] = ("slow", "middle", "fast")

VALUES_PER_TASK = 2
"""Values of a template's parameter that one task gets."""

_SUFFIX = ".py.txt"
_OWN_LINE = re.compile(r"^( *)\$\{(\w+)\}$", re.MULTILINE)
_INLINE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class SeedKernel:
    """One verified kernel for one task."""

    name: str
    """Template and parameter, such as `blocked-64`."""
    style: str
    """`torch`, `triton` or `c`."""
    speed: Speed
    """Measured class; seeds of one class are about 1.5 times or more faster than those of the class before."""
    reason: str
    """One short sentence that says why it is fast or slow."""
    source: str
    """Source text with `ModelNew`."""
    parameters: Mapping[str, int]


@dataclass(frozen=True)
class Template:
    """One data file."""

    name: str
    style: str
    speed: Speed
    reason: str
    sizes: tuple[Size, ...]
    kinds: tuple[str, ...]
    """Kinds of reference it solves; empty for all."""
    parameter: str
    values: tuple[int, ...]
    unit: str
    """`KiB`: the value is a block's size, and the parameter the rows that fill it; empty: the value itself."""
    text: str

    def renderings(self, spec: Spec, draw: Draw) -> Iterator[SeedKernel]:
        """The template filled for one task, once for each of the few drawn values of its parameter."""
        if not self.parameter:
            yield SeedKernel(self.name, self.style, self.speed, self.reason, self._fill(spec, {}), {})
            return
        numbers = {rows_of_block(value, spec.width) if self.unit == "KiB" else value for value in self.values}
        for number in draw.several(sorted(numbers), VALUES_PER_TASK):
            source = self._fill(spec, {self.parameter: number})
            yield SeedKernel(
                f"{self.name}-{number}", self.style, self.speed, self.reason, source, {self.parameter: number}
            )

    def _fill(self, spec: Spec, parameters: Mapping[str, int]) -> str:
        texts = {**spec.slots, **{name: str(value) for name, value in parameters.items()}}
        text = _OWN_LINE.sub(lambda m: _indented_slot(texts[m[2]], m[1]), self.text)
        text = text.replace(_DROPPED_LINE + "\n", "")
        for _ in range(2):  # a slot's own text may name the parameter
            text = _INLINE.sub(lambda m: texts[m[1]], text)
        return text


_DROPPED_LINE = "\0"


def _indented_slot(text: str, indent: str) -> str:
    return "\n".join(indent + line for line in text.splitlines()) if text else _DROPPED_LINE


def rows_of_block(kib: int, width: int) -> int:
    """Rows of `width` fp32 elements that fill up to `kib` KiB: a multiple of 8, or 1, 2 or 4 where 8 do not fit."""
    rows = max(1, kib * 256 // width)
    return rows // 8 * 8 if rows >= 8 else 1 << (rows.bit_length() - 1)


@cache
def templates(family: str) -> tuple[Template, ...]:
    """The data files of a family, by name; empty for a family without seeds."""
    folder = resources.files("tasks.procedural") / "seeds" / family
    if not folder.is_dir():
        return ()
    files = sorted((f for f in folder.iterdir() if f.name.endswith(_SUFFIX)), key=lambda f: f.name)
    return tuple(_parse(f.name.removesuffix(_SUFFIX), f.read_text(encoding="utf-8")) for f in files)


def seeds_of(family: str, spec: Spec, size: Size, draw: Draw) -> list[SeedKernel]:
    """All different seed kernels of one drawn task, slowest class first."""
    found = [
        seed
        for template in templates(family)
        if size in template.sizes and (not template.kinds or spec.kind in template.kinds)
        for seed in template.renderings(spec, draw)
    ]
    found.sort(key=lambda seed: SPEEDS.index(seed.speed))
    first: dict[str, SeedKernel] = {}
    for seed in found:
        first.setdefault(seed.source, seed)
    return list(first.values())


def _parse(name: str, text: str) -> Template:
    header, _, body = text.partition("\n---\n")
    fields: dict[str, Any] = tomllib.loads(header)
    parameter = fields.pop("parameter", {})
    return Template(
        name=name,
        style=fields["style"],
        speed=fields["speed"],
        reason=fields["reason"],
        sizes=tuple(fields["sizes"]),
        kinds=tuple(fields.get("kinds", ())),
        parameter=parameter.get("name", ""),
        values=tuple(parameter.get("values", ())),
        unit=parameter.get("unit", ""),
        text=body,
    )
