"""What a candidate changed in its own process: functions that are another object now, settings that differ at rest.

Invariant: a tripwire only. What it finds is reported and judged; nothing rests on its silence, since clock, comparison
and reference live in other processes.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import pickle
import time
import timeit
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional
import torch.testing

_WATCHED: dict[str, Any] = {
    "torch": torch, "torch.nn.functional": torch.nn.functional, "torch.testing": torch.testing,
    "torch.Tensor": torch.Tensor, "torch.nn.Module": torch.nn.Module, "torch.cuda": torch.cuda,
    "torch.cuda.Event": torch.cuda.Event, "torch.cuda.Stream": torch.cuda.Stream,
    "torch.cuda.CUDAGraph": torch.cuda.CUDAGraph, "time": time, "timeit": timeit,
    "json": json, "pickle": pickle, "gc": gc, "builtins": builtins,
}  # fmt: skip
_LIMIT = 40
_TORCH = os.path.dirname(torch.__file__) + os.sep

Snapshot = dict[str, dict[str, Any]]


@cache
def functions() -> Snapshot:
    """The callables of the watched modules and classes, by name; read once, by the zygote, before any worker."""
    return {place: _callables(owner) for place, owner in _WATCHED.items()}


def _callables(owner: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if callable(value)}


def replaced(before: Snapshot) -> list[str]:
    """Names whose object is another one now, torch's own replacements apart (its compiler wraps some); at most 40."""
    found = []
    for place, known in before.items():
        now = vars(_WATCHED[place])
        found += [f"{place}.{name}" for name, value in known.items() if _foreign(now.get(name), value)]
    return found[:_LIMIT]


def _foreign(now: Any, before: Any) -> bool:
    if now is before:
        return False
    code = getattr(now, "__code__", None)
    return not (isinstance(code, types.CodeType) and code.co_filename.startswith(_TORCH))


def settings() -> dict[str, str]:
    """Global settings of torch that change what others compute, or how fast."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    asked: dict[str, Callable[[], Any]] = {
        "torch.num_threads": torch.get_num_threads,
        "torch.grad_enabled": torch.is_grad_enabled,
        "torch.default_dtype": torch.get_default_dtype,
        "torch.deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision,
        "cuda.matmul.allow_tf32": lambda: matmul.allow_tf32,
        "cudnn.enabled": lambda: cudnn.enabled,
        "cudnn.benchmark": lambda: cudnn.benchmark,
        "cudnn.deterministic": lambda: cudnn.deterministic,
        "cudnn.allow_tf32": lambda: cudnn.allow_tf32,
    }
    return {name: _said(ask) for name, ask in asked.items()}


def _said(ask: Callable[[], Any]) -> str:
    try:
        return str(ask())
    except RuntimeError:  # torch refuses to answer once the newer of two names has been set
        return "set otherwise"


def changed_settings(before: dict[str, str]) -> list[str]:
    """Differences such as `torch.num_threads 1->2`."""
    now = settings()
    return [f"{name} {value}->{now[name]}" for name, value in before.items() if now[name] != value]
