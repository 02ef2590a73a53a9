"""Scans along rows between point-wise operations; a held-out family: never trained on, no seed kernels."""

from __future__ import annotations

from tasks.procedural.common import randn
from tasks.procedural.family import Draw, Family, Size, Spec, reference_source, rows_for
from tasks.procedural.pointwise import draw_chain

_ELEMENTS = {"cpu": 650_000, "gpu": 64_000_000}
_SCANS = {
    "cumsum": "x.cumsum(1)",
    "reverse_cumsum": "x.flip(1).cumsum(1).flip(1)",
    "running_max": "x.cummax(1)[0]",
    "rest": "x.sum(1, keepdim=True) - x.cumsum(1)",
}


def _draw(draw: Draw, size: Size) -> Spec:
    kind = draw.choice(tuple(_SCANS))
    before = draw_chain(draw, 1, heavy=False)
    after = draw_chain(draw, 1, second=False, heavy=False, without=("square",))
    width = draw.choice((128, 256, 512))
    rows = rows_for(_ELEMENTS[size] * draw.integer(8, 14) / 10, width)
    lines = [*before.plain(), f"x = {_SCANS[kind]}", *after.plain()]
    inputs = [randn(rows, width)] * (1 + before.second)
    return Spec(
        kind=kind,
        skills=(*before.skills, kind, *after.skills),
        source=reference_source("x, y" if before.second else "x", lines, inputs),
        width=width,
    )


FAMILY = Family("scans", "scans along rows", _draw, held_out=True)
