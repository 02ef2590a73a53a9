"""Poolings over windows that do not overlap, followed by point-wise operations."""

from __future__ import annotations

from tasks.procedural.common import chain_slots, randn
from tasks.procedural.family import Draw, Family, Size, Spec, reference_source
from tasks.procedural.pointwise import draw_chain

_F = "torch.nn.functional"
_CHANNELS = {"avg_pool2d": 36, "max_pool2d": 24, "avg_pool1d": 72}
_GPU_BATCHES = {"avg_pool2d": 160, "max_pool2d": 256, "avg_pool1d": 64}


def _triton_pool(two: bool, pair: str, window: int) -> list[str]:
    """Statements that read the window of output `i` into `x`; planes are contiguous, and all extents even."""
    if not two:
        return [
            f"x = tl.load(x_ptr + i * {window}, mask=m)",
            f"for t in tl.static_range(1, {window}):",
            f"    x += tl.load(x_ptr + i * {window} + t, mask=m)",
            f"x = x / {window}",
        ]
    pair = pair.replace("torch", "tl")
    loads = [f"tl.load(p{offset}, mask=m)" for offset in ("", " + 1", " + n", " + n + 1")]
    result = pair.format(pair.format(*loads[:2]), pair.format(*loads[2:]))
    return [
        "h = n // 2",
        "p = x_ptr + i // h * 2 * n + i % h * 2",
        f"x = {result}",
        *([] if "max" in pair else ["x = x / 4"]),
    ]


def _draw(draw: Draw, size: Size) -> Spec:
    kind = draw.choice(("avg_pool2d", "max_pool2d", "avg_pool1d"))
    chain = draw_chain(draw, 2, second=False, heavy=False)
    side = draw.choice((48, 64, 80))
    batch = draw.choice((4, 6, 8)) * (1 if size == "cpu" else _GPU_BATCHES[kind])
    window = draw.choice((4, 8))
    channels = _CHANNELS[kind]
    two = kind != "avg_pool1d"
    shape = (batch, channels, side, side) if two else (batch * 6, channels, side * 8)
    pool = f"{_F}.{kind}(x, {2 if two else window})"
    pair = "torch.maximum({}, {})" if kind == "max_pool2d" else "{} + {}"
    reduce = "amax" if kind == "max_pool2d" else "mean"
    slots = {
        "view": f"a.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).{reduce}((3, 5))" if two else
                f"a.unfold(2, {window}, {window}).mean(3)",
        "rows": "a = " + pair.format("a[:, :, ::2]", "a[:, :, 1::2]"),
        "columns": "a = " + pair.format("a[..., ::2]", "a[..., 1::2]"),
        "quarters": pair.format(*(pair.format(f"{v}[..., ::2]", f"{v}[..., 1::2]") for v in "ab")),
        "weight": "" if kind == "max_pool2d" else ".mul_(0.25)",
        "window": str(window),
        "pool": pool,
        "shape": ", ".join(str(n) for n in (*shape[:2], *(n // (2 if two else window) for n in shape[2:]))),
        "triton_pool": "\n".join(_triton_pool(two, pair, window)),
    }  # fmt: skip
    return Spec(
        kind=kind,
        skills=(kind, *chain.skills),
        source=reference_source("x", [f"x = {pool}", *chain.plain()], [randn(*shape)]),
        width=shape[-1],
        slots=chain_slots(chain) | slots,
    )


FAMILY = Family("pooling", "poolings with an epilogue", _draw)
