"""Reads tensors without calling any Python method of theirs: captured C functions and raw memory.

Invariant: everything used on a candidate's object was captured before candidate code ran.
"""

from __future__ import annotations

from typing import Any

import torch

from evaluator.worker.tree import TensorSpec

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_Base = torch._C.TensorBase
_data_ptr, _size, _stride, _element_size = _Base.data_ptr, _Base.size, _Base.stride, _Base.element_size
_storage, _offset = _Base.untyped_storage, _Base.storage_offset
_storage_bytes = torch.UntypedStorage.nbytes
_dtype_of, _layout_of, _device_of = _Base.dtype.__get__, _Base.layout.__get__, _Base.device.__get__
_is_conj, _is_neg = _Base.is_conj, _Base.is_neg
_attributes_of = object.__getattribute__
_state_dict = torch.nn.Module.state_dict
_strided = torch.strided

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
        torch.int64, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def is_tensor(value: Any) -> bool:
    """Whether a leaf counts as a tensor, subclasses included."""
    return isinstance(value, _Tensor)


def extent_elements(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last that a strided tensor touches."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the strides are those of some dense layout without overlap."""
    if 0 in shape:
        return True
    expected = 1
    for s, n in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1):
        if s != expected:
            return False
        expected *= n
    return True


def spec_of(tensor: torch.Tensor, offset: int = 0) -> TensorSpec:
    """Dtype, shape and stride of a tensor."""
    return TensorSpec(_NAMES.get(_dtype_of(tensor), "other"), tuple(_size(tensor)), tuple(_stride(tensor)), offset)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    return extent_elements(tuple(_size(tensor)), tuple(_stride(tensor))) * _element_size(tensor)


def describe(tensor: Any, path: str, device: str = "cpu") -> dict[str, Any]:
    """The fields of `LeafFacts`, and `address` (0 where nothing lies on `device` to copy) with `span_bytes`."""
    kind = type(tensor)
    plain = kind is _Tensor or kind is _Parameter
    row: dict[str, Any] = {"path": path, "plain": plain, "type_name": kind.__name__[:80], "attributes": 0, "address": 0}
    row |= {"span_bytes": 0, "storage_bytes": 0, "needed_bytes": 0}
    if not plain:
        return row | {"dtype": "other", "shape": [], "stride": [], "layout": "strided", "device": "cpu"}
    row["attributes"] = len(_attributes_of(tensor, "__dict__"))
    layout, where = _layout_of(tensor), _device_of(tensor)
    row |= {"layout": str(layout).removeprefix("torch."), "device": where.type}
    if layout is not _strided:
        return row | {"dtype": _NAMES.get(_dtype_of(tensor), "other"), "shape": list(_size(tensor)), "stride": []}
    spec = spec_of(tensor)
    row |= {"dtype": spec.dtype, "shape": list(spec.shape), "stride": list(spec.stride)}
    span = nbytes_of(tensor)
    row["needed_bytes"] = _offset(tensor) * _element_size(tensor) + span
    row["storage_bytes"] = _storage_bytes(_storage(tensor))
    if _is_conj(tensor) or _is_neg(tensor):
        row["layout"] = "lazy view"
    elif where.type == device and row["storage_bytes"] >= row["needed_bytes"]:
        row |= {"address": _data_ptr(tensor), "span_bytes": span}
    return row


def state_ranges(model: torch.nn.Module) -> list[tuple[int, int, str]]:
    """Addresses of parameters and buffers, with their names."""
    ranges = []
    for name, value in _state_dict(model).items():
        start = _data_ptr(value)
        ranges.append((start, start + nbytes_of(value), name))
    return ranges
