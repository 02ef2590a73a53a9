"""Chains of four or five point-wise operations on one or two tensors: memory traffic that fusion removes."""

from __future__ import annotations

from tasks.procedural.common import chain_slots, randn
from tasks.procedural.family import Draw, Family, Size, Spec, reference_source, rows_for
from tasks.procedural.pointwise import draw_chain

_ELEMENTS = {"cpu": 700_000, "gpu": 64_000_000}


def _draw(draw: Draw, size: Size) -> Spec:
    chain = draw_chain(draw, draw.integer(4, 5), heavy=False)
    width = draw.choice((256, 512, 768, 1024, 1280, 1536, 2048))
    share = draw.integer(8, 14) / 10
    rows = rows_for(_ELEMENTS[size] * share, width)
    return Spec(
        kind="chain",
        skills=chain.skills,
        source=reference_source(
            "x, y" if chain.second else "x", chain.plain(), [randn(rows, width)] * (1 + chain.second)
        ),
        width=width,
        slots=chain_slots(chain) | {"fresh": chain.fresh(), "into": chain.into("a", "b", "c")},
    )


FAMILY = Family("elementwise", "chains of point-wise operations", _draw)
