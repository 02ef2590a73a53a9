"""Shares of rows: softmax, its logarithm and rational relatives, between point-wise operations."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.procedural.common import chain_slots, randn
from tasks.procedural.family import Draw, Family, Size, Spec, reference_source, rows_for
from tasks.procedural.pointwise import draw_chain

_ELEMENTS = {"cpu": 600_000, "gpu": 64_000_000}


_LOOP = "for (long i = 0; i < n; i++)"
_MAXIMUM = ("#pragma omp simd reduction(max:t)", f"{_LOOP} {{ float v = out[i] = {{v}}; t = v > t ? v : t; }}")


@dataclass(frozen=True)
class _Share:
    """`{v}` is the value, `{o}` where the result goes."""

    plain: tuple[str, ...]
    direct: tuple[str, ...]
    """On a value `x` of its own, in torch's best formulation."""
    into: tuple[str, ...]
    triton: tuple[str, ...]
    c: tuple[str, ...]
    """Loops over a row that leave `s`, `t` or values in `out` for `c_value`; `{v}` is the value read."""
    c_value: str
    positive: bool = True


def _rational(name: str, triton: str, into: str, c: str) -> _Share:
    return _Share(
        (f"x = x.{name}()", "x = x / (x.mean(1, keepdim=True) + 1e-5)"),
        (f"x.{name}_()", "x /= x.mean(1, keepdim=True) + 1e-5"),
        (into, "b.div_(b.mean(1, keepdim=True) + 1e-5)"),
        (f"x = {triton}", "x = x / (tl.sum(x) / n + 1e-5)"),
        (
            "#pragma omp simd reduction(+:s)",
            f"{_LOOP} {{ float v = {{v}}; s += out[i] = {c}; }}",
            "s = 1 / (s / n + 1e-5f);",
        ),
        "out[i] * s",
    )


_SHARES = {
    "softmax": _Share(
        ("x = (x - x.amax(1, keepdim=True)).exp()", "x = x / x.mean(1, keepdim=True)"),
        ("x = torch.softmax(x, 1).mul_({n})",),
        ("torch.softmax({v}, 1, out=b).mul_({n})",),
        ("x = tl.exp(x - tl.max(x))", "x = x / tl.sum(x) * n"),
        (*_MAXIMUM, "#pragma omp simd reduction(+:s)", f"{_LOOP} s += out[i] = expf(out[i] - t);", "s = n / s;"),
        "out[i] * s",
    ),
    "log_softmax": _Share(
        ("x = x - x.amax(1, keepdim=True)", "x = x - x.exp().sum(1, keepdim=True).log()"),
        ("x = torch.log_softmax(x, 1)",),
        ("torch.log_softmax({v}, 1, out=b)",),
        ("x = x - tl.max(x)", "x = x - tl.log(tl.sum(tl.exp(x)))"),
        (*_MAXIMUM, "#pragma omp simd reduction(+:s)", f"{_LOOP} s += expf(out[i] - t);", "s = logf(s) + t;"),
        "out[i] - s",
        positive=False,
    ),
    "relu_share": _rational(
        "relu", "tl.where(m, tl.maximum(x, 0.0), 0.0)", "torch.clamp({v}, min=0, out=b)", "v < 0 ? 0 : v"
    ),
    "square_share": _rational("square", "tl.where(m, x * x, 0.0)", "torch.square({v}, out=b)", "v * v"),
}


def _draw(draw: Draw, size: Size) -> Spec:
    kind = draw.choice(tuple(_SHARES))
    share = _SHARES[kind]
    before = draw_chain(draw, 1, second=False, heavy=False, positive=kind == "relu_share")
    after = draw_chain(draw, 2, positive=share.positive, heavy=False)
    width = draw.choice((128, 256, 512, 768, 1024))
    rows = rows_for(_ELEMENTS[size] * draw.integer(8, 14) / 10, width)
    value = before.plain("a")[0].removeprefix("a = ")
    slots = {
        "before": before.plain()[0],
        "direct": "\n".join(share.direct).replace("{n}", str(width)),
        "into": "\n".join(line.replace("{v}", value).replace("{n}", str(width)) for line in share.into),
        "c_share": "\n".join(share.c).replace("{v}", before.c("x[i]")[0].removeprefix("x[i] = ").rstrip(";")),
        "c_value": share.c_value,
        "c_advance": "y += n, " if after.second else "",
        "triton_before": before.triton()[0],
        "triton_mask": 'x = tl.where(m, x, float("-inf"))' if "softmax" in kind else "",
        "triton_share": "\n".join(share.triton),
        "power": str(1 << (width - 1).bit_length()),
    }
    return Spec(
        kind=kind,
        skills=(*before.skills, kind, *after.skills),
        source=reference_source(
            "x, y" if after.second else "x",
            [before.plain()[0], *share.plain, *after.plain()],
            [randn(rows, width)] * (1 + after.second),
        ),
        width=width,
        slots=chain_slots(after) | slots,
    )


FAMILY = Family("softmax", "softmax and its relatives", _draw)
