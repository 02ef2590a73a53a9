"""Normalisations of rows by one statistic, with a point-wise epilogue."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.procedural.common import chain_slots, randn
from tasks.procedural.family import Draw, Family, Size, Spec, reference_source, rows_for
from tasks.procedural.pointwise import draw_chain

_ELEMENTS = {"cpu": 700_000, "gpu": 64_000_000}


@dataclass(frozen=True)
class _Norm:
    """`{v}` is the tensor, `{n}` its width; a norm subtracts or divides by a statistic."""

    plain: tuple[str, ...]
    operation: str
    statistic: str
    """As the reference computes it."""
    lean: str
    """The same statistic without a temporary as large as its input, where torch can."""
    triton: tuple[str, ...]
    c: tuple[str, ...]
    """Statement that adds `x[i]` to the statistic `s`, and the one that makes it the factor `f` or the offset `m`."""
    bounded: bool = False


_NORMS = {
    "row_rms": _Norm(
        ("x = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt()",),
        "div",
        "({v}.square().mean(1, keepdim=True) + 1e-5).sqrt()",
        "({v}.norm(dim=1, keepdim=True).square() / {n} + 1e-5).sqrt()",
        ("x = x / tl.sqrt(tl.sum(x * x) / n + 1e-5)",),
        ("s += x[i] * x[i];", "f = 1 / sqrtf(s / n + 1e-5f);"),
    ),
    "row_l2": _Norm(
        ("x = x / (x.square().sum(1, keepdim=True).sqrt() + 1e-5)",),
        "div",
        "{v}.square().sum(1, keepdim=True).sqrt() + 1e-5",
        "{v}.norm(dim=1, keepdim=True) + 1e-5",
        ("x = x / (tl.sqrt(tl.sum(x * x)) + 1e-5)",),
        ("s += x[i] * x[i];", "f = 1 / (sqrtf(s) + 1e-5f);"),
        bounded=True,
    ),
    "row_l1": _Norm(
        ("x = x / (x.abs().mean(1, keepdim=True) + 1e-5)",),
        "div",
        "{v}.abs().mean(1, keepdim=True) + 1e-5",
        "{v}.abs().mean(1, keepdim=True) + 1e-5",
        ("x = x / (tl.sum(tl.abs(x)) / n + 1e-5)",),
        ("s += fabsf(x[i]);", "f = 1 / (s / n + 1e-5f);"),
    ),
    "row_max": _Norm(
        ("x = x / (x.abs().amax(1, keepdim=True) + 1e-5)",),
        "div",
        "{v}.abs().amax(1, keepdim=True) + 1e-5",
        "torch.maximum({v}.amax(1, True), -{v}.amin(1, True)) + 1e-5",
        ("x = x / (tl.max(tl.abs(x)) + 1e-5)",),
        ("s = fabsf(x[i]) > s ? fabsf(x[i]) : s;", "f = 1 / (s + 1e-5f);"),
        bounded=True,
    ),
    "row_standard": _Norm(
        ("x = x - x.mean(1, keepdim=True)", "x = x / (x.std(1, keepdim=True) + 1e-5)"),
        "sub",
        "{v}.mean(1, keepdim=True)).div_(x.std(1, keepdim=True) + 1e-5",
        "{v}.mean(1, keepdim=True)",
        (
            "x = tl.where(m, x - tl.sum(x) / n, 0.0)",
            "x = x / (tl.sqrt(tl.sum(x * x) / (n - 1)) + 1e-5)",
        ),
        ("", ""),
    ),
    "row_center": _Norm(
        ("x = x - x.mean(1, keepdim=True)",),
        "sub",
        "{v}.mean(1, keepdim=True)",
        "{v}.mean(1, keepdim=True)",
        ("x = x - tl.sum(x) / n",),
        ("s += x[i];", "m = s / n;"),
    ),
}


def _draw(draw: Draw, size: Size) -> Spec:
    kind = draw.choice(tuple(_NORMS))
    norm = _NORMS[kind]
    chain = draw_chain(draw, 3, bounded=norm.bounded, heavy=False)
    width = draw.choice((256, 512, 768, 1024, 1536, 2048))
    share = draw.integer(8, 14) / 10
    slow = size == "cpu" and kind == "row_standard"  # the standard deviation alone takes 7 ns an element
    rows = rows_for(_ELEMENTS[size] * share * (0.4 if slow else 1), width)

    def written(text: str, v: str) -> str:
        return text.replace("{v}", v).replace("{n}", str(width))

    slots = {
        "fresh": f"x.{norm.operation}({written(norm.statistic, 'x')})",
        "lean": f"torch.{norm.operation}(a, {written(norm.lean, 'a')}, out=b)",
        "triton_norm": "\n".join(norm.triton),
        "c_statistic": norm.c[0],
        "c_factor": norm.c[1],
        "width": str(width),
        "root": f"{width - 1} ** 0.5",
        "power": str(1 << (width - 1).bit_length()),
        "c_operator": "max" if kind == "row_max" else "+",
    }
    return Spec(
        kind=kind,
        skills=(kind, *chain.skills),
        source=reference_source(
            "x, y" if chain.second else "x",
            [*norm.plain, *chain.plain()],
            [randn(rows, width)] * (1 + chain.second),
        ),
        width=width,
        slots=chain_slots(chain) | slots,
    )


FAMILY = Family("row_norm", "normalisations of rows with an epilogue", _draw)
