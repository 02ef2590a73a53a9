"""Trees of tensors and plain scalars, and their fixed JSON form.

A leaf tensor is `{"tensor": i}`: the i-th entry of a list of `TensorSpec`. Lists, tuples and dicts with string keys
nest; None, bool, int, float and str stand for themselves (floats as hex text, so that NaN, infinities and every bit
survive). Invariant: decoding makes only these types, whatever the text says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 8


class UnsupportedLeaf(TypeError):
    """A value that the wire does not carry."""


@dataclass(frozen=True)
class TensorSpec:
    """A strided tensor in an arena: `offset` is in bytes, shape and stride in elements."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    def to_wire(self) -> list[Any]:
        return [self.dtype, list(self.shape), list(self.stride), self.offset]

    @classmethod
    def from_wire(cls, value: Any) -> TensorSpec:
        """Reads `to_wire`; raises ValueError on anything else."""
        if not isinstance(value, list) or len(value) != 4:
            raise ValueError("a tensor is [dtype, shape, stride, offset]")
        dtype, shape, stride, offset = value
        sizes_ok = all(
            isinstance(side, list) and all(type(n) is int and n >= 0 for n in side) for side in (shape, stride)
        )
        if not isinstance(dtype, str) or not sizes_ok or type(offset) is not int or offset < 0 or len(shape) > 16:
            raise ValueError("a tensor is [dtype, shape, stride, offset]")
        if len(shape) != len(stride):
            raise ValueError("shape and stride differ in length")
        return cls(dtype, tuple(shape), tuple(stride), offset)


@dataclass
class Flat:
    """A tree taken apart: `form` is its JSON, `tensors` and `paths` (`0`, `1.hidden`) run side by side."""

    form: Any = None
    structure: str = ""
    """Such as `tensor`, `scalar` or `tuple(tensor,dict(a:tensor))`."""
    tensors: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


def flatten(value: Any, is_tensor: Callable[[Any], bool]) -> Flat:
    """Takes a tree apart. Raises UnsupportedLeaf."""
    flat = Flat()
    flat.form, flat.structure = _flatten(value, is_tensor, flat, (), 0)
    return flat


def _flatten(
    value: Any, is_tensor: Callable[[Any], bool], flat: Flat, path: tuple[str, ...], depth: int
) -> tuple[Any, str]:
    if depth > MAX_DEPTH:
        raise UnsupportedLeaf(f"a tree deeper than {MAX_DEPTH}")
    if is_tensor(value):
        flat.tensors.append(value)
        flat.paths.append(".".join(path) or "0")
        return {"tensor": len(flat.tensors) - 1}, "tensor"
    if value is None or type(value) in (bool, int, str):
        return value, "none" if value is None else "scalar"
    if type(value) is float:
        return {"float": value.hex()}, "scalar"
    if type(value) in (list, tuple):
        kind = type(value).__name__
        parts = [_flatten(item, is_tensor, flat, (*path, str(i)), depth + 1) for i, item in enumerate(value)]
        forms = [form for form, _ in parts]
        return (forms if kind == "list" else {"tuple": forms}), f"{kind}({','.join(text for _, text in parts)})"
    if type(value) is dict and all(type(key) is str for key in value):
        pairs = [(key, _flatten(item, is_tensor, flat, (*path, key), depth + 1)) for key, item in value.items()]
        form = {"dict": [[key, part] for key, (part, _) in pairs]}
        return form, f"dict({','.join(f'{key}:{text}' for key, (_, text) in pairs)})"
    raise UnsupportedLeaf(f"a value of type {type(value).__name__}")


def unflatten(form: Any, tensors: list[Any]) -> Any:
    """The value that `flatten` took apart; raises ValueError on a form it never makes."""
    if form is None or isinstance(form, bool | int | str):
        return form
    if isinstance(form, list):
        return [unflatten(item, tensors) for item in form]
    if isinstance(form, dict) and len(form) == 1:
        ((kind, value),) = form.items()
        if kind == "tensor" and type(value) is int and 0 <= value < len(tensors):
            return tensors[value]
        if kind == "float" and isinstance(value, str):
            return float.fromhex(value)
        if kind == "tuple" and isinstance(value, list):
            return tuple(unflatten(item, tensors) for item in value)
        if kind == "dict" and isinstance(value, list):
            return {key: unflatten(item, tensors) for key, item in value}
    raise ValueError("not a tree of tensors and scalars")
