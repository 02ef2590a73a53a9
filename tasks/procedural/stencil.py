"""Small convolutions of one channel with weights given as an input, followed by point-wise operations."""

from __future__ import annotations

from tasks.procedural.common import chain_slots, randn
from tasks.procedural.family import Draw, Family, Size, Spec, reference_source, rows_for
from tasks.procedural.pointwise import draw_chain

_ELEMENTS = {"cpu": 300_000, "gpu": 32_000_000}
_F = "torch.nn.functional"


def _draw(draw: Draw, size: Size) -> Spec:
    kind = draw.choice(("conv3", "conv5", "conv3_valid"))
    taps = 5 if kind == "conv5" else 3
    pad = 0 if kind == "conv3_valid" else taps // 2
    chain = draw_chain(draw, 2, second=False, heavy=False)
    width = draw.choice((512, 768, 1024, 1536))
    rows = rows_for(_ELEMENTS[size] * draw.integer(8, 14) / 10, width, 8)
    padding = f", padding={pad}" if pad else ""
    slots = {"taps": str(taps), "padding": padding, "pad": str(pad), "power": str(1 << (width - 1).bit_length())}
    return Spec(
        kind=kind,
        skills=(kind, *chain.skills),
        source=reference_source(
            "x, w",
            [f"x = {_F}.conv1d(x, w{padding})", *chain.plain()],
            [randn(rows, 1, width), randn(1, 1, taps)],
        ),
        width=width,
        slots=chain_slots(chain, arguments="x, w") | slots,
    )


FAMILY = Family("stencil", "small convolutions with an epilogue", _draw)
