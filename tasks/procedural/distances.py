"""Distances between all pairs of rows; a held-out family: never trained on, no seed kernels."""

from __future__ import annotations

from tasks.procedural.common import randn
from tasks.procedural.family import Draw, Family, Size, Spec, reference_source
from tasks.procedural.pointwise import draw_chain

_POINTS = {"cpu": 256, "gpu": 2048}
_DISTANCES = {
    "squared_distance": ["x = (x[:, None] - z).square().mean(2)"],
    "manhattan": ["x = (x[:, None] - z).abs().mean(2)"],
    "chebyshev": ["x = (x[:, None] - z).abs().amax(2)"],
    "cosine": [
        "x = x / x.norm(dim=1, keepdim=True)",
        "z = z / z.norm(dim=1, keepdim=True)",
        "x = (x[:, None] * z).sum(2)",
    ],
}


def _draw(draw: Draw, size: Size) -> Spec:
    kind = draw.choice(tuple(_DISTANCES))
    after = draw_chain(draw, 1, second=False, positive=kind != "cosine", bounded=kind == "cosine", heavy=False)
    features = draw.choice((12, 16, 20, 24, 28, 32))
    points = _POINTS[size] * draw.integer(26, 40) // 32
    others = _POINTS[size] * draw.integer(26, 40) // 32
    return Spec(
        kind=kind,
        skills=(kind, *after.skills),
        source=reference_source(
            "x, z", [*_DISTANCES[kind], *after.plain()], [randn(points, features), randn(others, features)]
        ),
        width=features,
    )


FAMILY = Family("distances", "distances between all pairs of rows", _draw, held_out=True)
