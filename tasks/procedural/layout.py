"""Rearrangements and gathers, followed by point-wise operations."""

from __future__ import annotations

from tasks.procedural.common import chain_slots, randn
from tasks.procedural.family import Draw, Family, Size, Spec, reference_source, rows_for
from tasks.procedural.pointwise import draw_chain

_ELEMENTS = {"cpu": 800_000, "gpu": 64_000_000}


def _draw(draw: Draw, size: Size) -> Spec:
    kind = draw.choice(("gather_rows", "repeat_rows", "roll", "flip"))
    chain = draw_chain(draw, 3, heavy=False, second=kind != "repeat_rows")
    width = draw.choice((256, 512, 768, 1024))
    rows = rows_for(_ELEMENTS[size] * draw.integer(8, 14) / 10, width)
    step = draw.integer(1, 99)
    gathers, repeats = kind == "gather_rows", kind == "repeat_rows"
    move = {"gather_rows": "{v}[{i}]", "repeat_rows": "{v}.repeat_interleave(2, 0)", "roll": f"{{v}}.roll({step}, 1)",
            "flip": "{v}.flip(1)"}[kind]  # fmt: skip
    moved = move.format(v="x", i="i")
    arguments = "x, i" if gathers else "x"
    inputs = [randn(rows // (1 + repeats), width), *([f"torch.randperm({rows})"] if gathers else [])]
    inputs += [randn(rows, width)] if chain.second else []
    slots = {
        "fresh": f"{chain.fresh()}.repeat_interleave(2, 0)" if repeats else chain.fresh(moved),
        "into": chain.into(move.format(v="x" if gathers else "a", i="a"), "b", "c"),
        "empty": f"x.new_empty({rows}, {width})" if repeats else "torch.empty_like(x)",
        "index": {
            "gather_rows": "tl.load(i_ptr + r) * n + j",
            "repeat_rows": "r // 2 * n + j",
            "roll": f"r * n + (j + n - {step}) % n",
            "flip": "r * n + n - 1 - j",
        }[kind],
        "c_index": {
            "gather_rows": "index[r] * n + j",
            "repeat_rows": "r / 2 * n + j",
            "roll": f"r * n + (j < {step} ? j + n : j) - {step}",
            "flip": "r * n + n - 1 - j",
        }[kind],
        "power": str(1 << (width - 1).bit_length()),
        "index_parameter": "i_ptr, " if gathers else "",
        "c_index_parameter": "const long *index, " if gathers else "",
        "index_argument": "i, " if gathers else "",
    }
    blocks = "i.split(${ROWS})" if gathers else "x.split(${ROWS})"
    common = chain_slots(chain, arguments=arguments, blocks=blocks)
    if repeats:
        common["blocks"] = "x.split(${ROWS}), out.split(2 * ${ROWS})"
    return Spec(
        kind=kind,
        skills=(kind, *chain.skills),
        source=reference_source(
            f"{arguments}, y" if chain.second else arguments, [f"x = {moved}", *chain.plain()], inputs
        ),
        width=width,
        slots=common | slots,
    )


FAMILY = Family("layout", "gathers and rearrangements with an epilogue", _draw)
