"""Products whose structure makes most of the work needless: diagonal and triangular factors, thin chains."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.procedural.common import chain_slots, randn
from tasks.procedural.family import Draw, Family, Size, Spec, reference_source
from tasks.procedural.pointwise import draw_chain

_UNIT = {"cpu": 16, "gpu": 128}
"""What sides are multiples of."""


@dataclass(frozen=True)
class _Product:
    """`{n}` is the side, `{m}` the other dimension of the second factor."""

    arguments: str
    plain: str
    inputs: tuple[tuple[str, ...], ...]
    """Names of the dimensions."""
    factor: str
    """Appended to the inputs after the first, so that sums over a side stay of order one."""
    short: str
    """The same result with the needless work left out."""


_PRODUCTS = {
    "diagonal_left": _Product("d, x", "torch.diag(d) @ x", (("n",), ("n", "m")), "", "x * d[:, None]"),
    "diagonal_right": _Product("x, d", "x @ torch.diag(d)", (("m", "n"), ("n",)), "", "x * d"),
    "thin_chain": _Product("x, w, v", "x @ w @ v", (("m", "n"), ("n", "n"), ("n", "8")), " / 20", "x @ (w @ v)"),
    "triangular": _Product("x, w", "x.tril() @ w", (("n", "n"), ("n", "m")), " / 20", ""),
}


def _draw(draw: Draw, size: Size) -> Spec:
    kind = draw.choice(tuple(_PRODUCTS))
    product = _PRODUCTS[kind]
    chain = draw_chain(draw, 2, second=False, heavy=False)
    side = draw.integer(28, 38) * _UNIT[size]
    other = draw.integer(24, 34) * _UNIT[size]
    sizes = {"n": side, "m": other, "8": 8}
    slots = {"product": product.plain, "short": product.short, "side": str(side), "other": str(other)}
    return Spec(
        kind=kind,
        skills=(kind, *chain.skills),
        source=reference_source(
            product.arguments,
            [f"x = {product.plain}", *chain.plain()],
            [
                randn(*(sizes[name] for name in shape)) + (product.factor if place else "")
                for place, shape in enumerate(product.inputs)
            ],
        ),
        width=side,
        slots=chain_slots(chain, arguments=product.arguments) | slots,
    )


FAMILY = Family("structured_matmul", "products with a diagonal, triangular or thin factor", _draw)
