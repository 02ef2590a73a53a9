"""Products with a short inner dimension before point-wise operations, which cost as much as the product."""

from __future__ import annotations

from tasks.procedural.common import chain_slots, randn
from tasks.procedural.family import Draw, Family, Size, Spec, reference_source, rows_for
from tasks.procedural.pointwise import draw_chain

_ELEMENTS = {"cpu": 800_000, "gpu": 64_000_000}
_INNER = {"cpu": (16, 24, 32), "gpu": (64, 96, 128)}


def _draw(draw: Draw, size: Size) -> Spec:
    kind = draw.choice(("matmul", "matmul_transposed", "linear"))
    chain = draw_chain(draw, 4)
    inner = draw.choice(_INNER[size])
    width = draw.choice((256, 384, 512, 768, 1024))
    rows = rows_for(_ELEMENTS[size] * draw.integer(8, 14) / 10, width)
    weight = {"matmul": [randn(inner, width)], "matmul_transposed": [randn(width, inner)], "linear": []}[kind]
    product = {"matmul": "x @ w", "matmul_transposed": "x @ w.T", "linear": "self.linear(x)"}[kind]
    into = {
        "matmul": "torch.mm(a, w, out=b)",
        "matmul_transposed": "torch.mm(a, w.T, out=b)",
        "linear": "torch.addmm(self.linear.bias, a, self.linear.weight.T, out=b)",
    }[kind]
    layer = [f"self.linear = torch.nn.Linear({inner}, {width})"] if kind == "linear" else []
    arguments = "x, w" if weight else "x"
    constructor = ["def __init__(self):", "    super().__init__()", *(f"    {line}" for line in layer)]
    slots = {
        "constructor": "\n".join(constructor) if layer else "",
        "product": product,
        "product_into": into,
        "width": str(width),
    }
    inputs = [randn(rows, inner), *weight, *([randn(rows, width)] if chain.second else [])]
    return Spec(
        kind=kind,
        skills=(kind, *chain.skills),
        source=reference_source(
            f"{arguments}, y" if chain.second else arguments,
            [f"x = {product}", *chain.plain()],
            inputs,
            init_lines=layer,
        ),
        width=width,
        slots=chain_slots(chain, arguments=arguments) | slots,
    )


FAMILY = Family("matmul_epilogue", "products with a point-wise epilogue", _draw)
