"""Chains of point-wise operations reduced to one value per row: nothing large needs to be stored at all."""

from __future__ import annotations

from tasks.procedural.common import chain_slots, randn
from tasks.procedural.family import Draw, Family, Size, Spec, reference_source, rows_for
from tasks.procedural.pointwise import draw_chain

_ELEMENTS = {"cpu": 1_200_000, "gpu": 64_000_000}
_REDUCTIONS = {
    "row_mean": (".mean(1)", "tl.sum(x) / n", "s += v;", "s / n"),
    "row_sum": (".sum(1)", "tl.sum(x)", "s += v;", "s"),
    "row_length": (".norm(dim=1)", "tl.sqrt(tl.sum(x * x))", "s += v * v;", "sqrtf(s)"),
}
"""Method, Triton expression of the masked `x`, C statement and C result."""


def _draw(draw: Draw, size: Size) -> Spec:
    kind = draw.choice(tuple(_REDUCTIONS))
    reduced, triton, step, result = _REDUCTIONS[kind]
    chain = draw_chain(draw, draw.integer(3, 4), heavy=False)
    width = draw.choice((256, 512, 768, 1024, 1280, 1536, 2048))
    rows = rows_for(_ELEMENTS[size] * draw.integer(8, 14) / 10, width)
    second = chain.second
    slots = {
        "fresh": chain.fresh() + reduced,
        "block": chain.fresh("a").replace("y", "c") + reduced,
        "names_in": "a, c" if second else "a",
        "blocks_in": "zip(x.split(${ROWS}), y.split(${ROWS}))" if second else "x.split(${ROWS})",
        "triton_result": triton,
        "power": str(1 << (width - 1).bit_length()),
        "c_step": step,
        "c_result": result,
    }
    return Spec(
        kind=kind,
        skills=(*chain.skills, kind),
        source=reference_source(
            "x, y" if second else "x", [*chain.plain(), f"x = x{reduced}"], [randn(rows, width)] * (1 + second)
        ),
        width=width,
        slots=chain_slots(chain) | slots,
    )


FAMILY = Family("row_reduce", "chains reduced to one value per row", _draw)
