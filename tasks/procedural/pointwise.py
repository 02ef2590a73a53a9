"""Point-wise sub-skills: one vocabulary for the chains, prologues and epilogues of all families.

Each operation is written once in every language that seeds are written in. Invariants: finite on the whole line, so
that shifted, scaled and sign-flipped inputs stay finite; no operation follows one after which it would do nothing;
constants have one decimal, so that references stay short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.procedural.family import Draw


@dataclass(frozen=True)
class Pointwise:
    """One operation. In its texts `{v}` is the value, `{k}` the constant, `{y}` the second input, `{o}` the result."""

    name: str
    torch: str
    inplace: str
    """Method calls that change a tensor and return it."""
    into: str
    """Expression that computes the operation on `{v}` into `{o}` and returns `{o}`."""
    triton: str
    c: str
    tenths: tuple[int, int] | None = None
    """Range of the constant in tenths; None for an operation without one."""
    second: bool = False
    heavy: bool = False
    """It computes a transcendental function; a chain has at most one, so that memory stays what matters."""
    constant: str = ""


POINTWISE = (
    Pointwise("scale", "{v} * {k}", ".mul_({k})", "torch.mul({v}, {k}, out={o})", "{v} * {k}", "{v} * {k}f", (3, 9)),
    Pointwise("shift", "{v} + {k}", ".add_({k})", "torch.add({v}, {k}, out={o})", "{v} + {k}", "{v} + {k}f", (2, 9)),
    Pointwise("mirror", "{k} - {v}", ".neg_().add_({k})", "torch.neg({v}, out={o}).add_({k})", "{k} - {v}",
              "{k}f - {v}", (5, 15)),
    Pointwise("relu", "{v}.relu()", ".relu_()", "torch.clamp({v}, min=0, out={o})", "tl.maximum({v}, 0.0)",
              "{v} < 0 ? 0 : {v}"),
    Pointwise("abs", "{v}.abs()", ".abs_()", "torch.abs({v}, out={o})", "tl.abs({v})", "fabsf({v})"),
    Pointwise("square", "{v}.square()", ".square_()", "torch.square({v}, out={o})", "{v} * {v}", "{v} * {v}"),
    Pointwise("clamp", "{v}.clamp(-{k}, {k})", ".clamp_(-{k}, {k})", "torch.clamp({v}, -{k}, {k}, out={o})",
              "tl.minimum(tl.maximum({v}, -{k}), {k})", "{v} < -{k}f ? -{k}f : {v} > {k}f ? {k}f : {v}", (11, 19)),
    Pointwise("cap", "{v}.clamp(max={k})", ".clamp_(max={k})", "torch.clamp({v}, max={k}, out={o})",
              "tl.minimum({v}, {k})", "{v} > {k}f ? {k}f : {v}", (5, 15)),
    Pointwise("negate", "-{v}", ".neg_()", "torch.neg({v}, out={o})", "-{v}", "-{v}"),
    Pointwise("tanh", "{v}.tanh()", ".tanh_()", "torch.tanh({v}, out={o})", "2 * tl.sigmoid(2 * {v}) - 1", "tanhf({v})",
              heavy=True),
    Pointwise("sigmoid", "{v}.sigmoid()", ".sigmoid_()", "torch.sigmoid({v}, out={o})", "tl.sigmoid({v})",
              "1 / (1 + expf(-{v}))", heavy=True),
    Pointwise("add_y", "{v} + y", ".add_({y})", "torch.add({v}, {y}, out={o})", "{v} + y", "{v} + y[i]", second=True),
    Pointwise("mul_y", "{v} * y", ".mul_({y})", "torch.mul({v}, {y}, out={o})", "{v} * y", "{v} * y[i]", second=True),
    Pointwise("sub_y", "{v} - y", ".sub_({y})", "torch.sub({v}, {y}, out={o})", "{v} - y", "{v} - y[i]", second=True),
)  # fmt: skip


class Chain:
    """A drawn sequence of point-wise operations, and how it is written."""

    def __init__(self, steps: Sequence[Pointwise]) -> None:
        self.steps = tuple(steps)

    @property
    def skills(self) -> tuple[str, ...]:
        """Names of the operations in order."""
        return tuple(step.name for step in self.steps)

    @property
    def second(self) -> bool:
        """Whether a second input `y` is read."""
        return any(step.second for step in self.steps)

    def plain(self, v: str = "x") -> list[str]:
        """One assignment per operation, each making a new tensor."""
        return [f"{v} = {_fill(step.torch, step, v=v)}" for step in self.steps]

    def inplace(self, y: str = "y", start: int = 0) -> str:
        """Method calls that change a tensor, from operation `start` on; append them to an expression."""
        return "".join(_fill(step.inplace, step, y=y) for step in self.steps[start:])

    def fresh(self, v: str = "x") -> str:
        """The whole chain as an expression: the first operation makes the tensor, the others change it."""
        first = _fill(self.steps[0].torch, self.steps[0], v=v)
        is_call = self.steps[0].torch.startswith("{v}.")
        return (first if is_call else f"({first})") + self.inplace(start=1)

    def into(self, v: str, o: str, y: str = "y") -> str:
        """The whole chain as an expression that fills `o` and makes no tensor."""
        return _fill(self.steps[0].into, self.steps[0], v=v, o=o, y=y) + self.inplace(y, start=1)

    def triton(self, v: str = "x") -> list[str]:
        """One Triton assignment per operation; `y` is already loaded."""
        return [f"{v} = {_fill(step.triton, step, v=v)}" for step in self.steps]

    def c(self, v: str = "v") -> list[str]:
        """One C statement per operation; `y[i]` is the second input."""
        return [f"{v} = {_fill(step.c, step, v=v)};" for step in self.steps]


def draw_chain(
    draw: Draw, length: int, *, second: bool = True, positive: bool = False, bounded: bool = False, heavy: bool = True,
    without: Sequence[str] = (),
) -> Chain:  # fmt: skip
    """Draws a chain of different operations.

    `positive` and `bounded` say what is known of the value before it (>= 0; within [-1, 1]); `second` allows one
    operation with `y`, `heavy` one transcendental, and `without` names operations left out.
    """
    steps: list[Pointwise] = []
    while len(steps) < length:
        allowed = [
            op for op in POINTWISE if op.name not in without and _useful(op, steps, positive, bounded, second, heavy)
        ]
        step = draw.choice(allowed)
        if step.tenths is not None:
            step = replace(step, constant=draw.tenths(*step.tenths))
        steps.append(step)
        positive, bounded = _after(step, positive, bounded)
    return Chain(steps)


_USELESS = {
    ("abs", "square"), ("negate", "abs"), ("negate", "square"), ("negate", "mirror"), ("mirror", "negate"),
    ("negate", "relu"), ("mirror", "relu"), ("cap", "clamp"), ("clamp", "cap"),
}  # fmt: skip
"""Neighbours that fold into one operation, or whose pair is often constant."""


def _useful(
    op: Pointwise, before: Sequence[Pointwise], positive: bool, bounded: bool, second: bool, heavy: bool
) -> bool:
    if any(op.name == step.name for step in before):
        return False
    if op.second and (not second or any(step.second for step in before)):
        return False
    if op.heavy and (not heavy or any(step.heavy for step in before)):
        return False
    if positive and op.name in ("relu", "abs"):
        return False
    if bounded and op.name in ("clamp", "cap"):
        return False
    last = before[-1].name if before else ""
    return (last, op.name) not in _USELESS


def _after(op: Pointwise, positive: bool, bounded: bool) -> tuple[bool, bool]:
    if op.name in ("relu", "abs", "square"):
        return True, bounded
    if op.name == "sigmoid":
        return True, True
    if op.name == "tanh":
        return positive, True
    if op.name == "scale":
        return positive, bounded
    return positive and op.name in ("shift", "clamp", "cap"), False


def _fill(text: str, op: Pointwise, *, v: str = "x", y: str = "y", o: str = "out") -> str:
    return text.replace("{k}", op.constant).replace("{v}", v).replace("{y}", y).replace("{o}", o)
