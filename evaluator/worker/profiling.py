"""Where a model's time goes: its calls under PyTorch's profiler, and the operands of its operators.

Invariants: runs after everything that counts, in the sealed worker; what it says is the worker's own word and changes
no verdict and no number; names are cut and printable.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

ROWS_KEPT = 40
NAME_LENGTH = 200
CALL = "kontrast call"
OUTSIDE = "outside of PyTorch's operators (Python, own native code)"
_ALLOCATIONS = frozenset(f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty"))

Row = dict[str, Any]


class OperandBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators take and return; views and bare allocations move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        still = func.is_view or name in _ALLOCATIONS
        self.by_name[name] += 0 if still else _nbytes(args) + _nbytes(kwargs or {}) + _nbytes(result)
        return result


def _nbytes(value: Any) -> int:
    """Bytes of all tensors in a nested value; an expanded tensor counts as its storage."""
    if isinstance(value, torch.Tensor):
        return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())
    if isinstance(value, list | tuple):
        return sum(map(_nbytes, value))
    return sum(map(_nbytes, value.values())) if isinstance(value, dict) else 0


def run(model: Callable[..., Any], calls: list[list[Any]], rounds: int, device: torch.device) -> dict[str, Any]:
    """Profiles `rounds` passes over the calls, after one that is not counted.

    Answers the number of calls, and rows with `name`, `kind` (`operator` or `kernel`), `count` and `ns` over all calls,
    and `bytes` of one call (-1 where they are not known), by falling time. Operators are those that PyTorch hands to
    the device's library, what they call counted in; their time is the device's where there is one.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes to standard error
    on_device = device.type == "cuda"
    with torch.no_grad():
        with OperandBytes() as operands:
            model(*calls[0])
        _passes(model, calls, 1, on_device)
        profiler = _passes(model, calls, rounds, on_device)
    rows = _operators(profiler.events(), operands.by_name, on_device)
    if on_device:
        rows += [
            _row(event.key, "kernel", event.count, event.self_device_time_total, -1)
            for event in profiler.key_averages()
            if event.device_type == DeviceType.CUDA and event.key != CALL
        ]
    kept = sorted((row for row in rows if row["ns"] > 0), key=lambda row: -row["ns"])
    return {"calls": rounds * len(calls), "rows": kept[:ROWS_KEPT]}


def _passes(model: Callable[..., Any], calls: list[list[Any]], rounds: int, on_device: bool) -> Any:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_device else [])
    with profile(activities=activities) as profiler:
        for inputs in calls * rounds:
            with record_function(CALL):
                model(*inputs)
        if on_device:
            torch.cuda.synchronize()
    return profiler


def _operators(events: Any, operands: dict[str, int], on_device: bool) -> list[Row]:
    """The operators named in `operands`, and what the calls spent outside of them."""
    spent: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)

    def spent_us(event: Any) -> float:
        return float(event.device_time_total if on_device else event.cpu_time_total)

    def walk(event: Any) -> None:
        for child in event.cpu_children:
            if child.name in operands:
                spent[child.name] += spent_us(child)
                counts[child.name] += 1
            else:
                walk(child)

    called = [event for event in events if event.name == CALL and event.device_type == DeviceType.CPU]
    for event in called:
        walk(event)
    outside = sum(map(spent_us, called)) - sum(spent.values())
    rows = [_row(name, "operator", counts[name], spent[name], operands[name]) for name in spent]
    return [*rows, _row(OUTSIDE, "operator", len(called), outside, -1)]


def _row(name: str, kind: str, count: int, spent_us: float, moved: int) -> Row:
    name = "".join(c if c.isprintable() else "?" for c in name)[:NAME_LENGTH]
    return {"name": name, "kind": kind, "count": int(count), "ns": max(0, round(1000 * spent_us)), "bytes": moved}
