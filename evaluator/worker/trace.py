"""Watches one call of the candidate's model: exceptions that its own code swallowed, compilers that it asked for.

Invariant: traced calls are never timed; the tracer sees only frames of the candidate's file, and reports what
happened, never what the text says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_CONTROL_FLOW = (StopIteration, StopAsyncIteration, GeneratorExit, KeyError)
"""Exceptions that honest code uses to steer: iteration, and look-ups in a cache of work space."""


class CallTrace:
    """Runs calls under a tracer and counts those in which the candidate's code caught an exception and went on."""

    def __init__(self, filename: str) -> None:
        self._filename = filename
        self.calls = 0
        self.with_swallowed = 0
        self.swallowed: list[str] = []
        self._seen: list[str] = []

    def run(self, model: Callable[..., Any], inputs: list[Any]) -> Any:
        """Runs one call; its exceptions pass through."""
        self._seen = []
        before = sys.gettrace()
        sys.settrace(self._global)
        try:
            result = model(*inputs)
        finally:
            sys.settrace(before)
        self.calls += 1
        if self._seen:
            self.with_swallowed += 1
            self.swallowed += [text for text in self._seen if text not in self.swallowed][:4]
        return result

    def _global(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._local if frame.f_code.co_filename == self._filename else None

    def _local(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception" and not issubclass(argument[0], _CONTROL_FLOW):
            self._seen.append(f"{argument[0].__name__} at line {frame.f_lineno}"[:120])
        return self._local

    def report(self) -> dict[str, Any]:
        """The fields of `OwnWork` that a trace fills."""
        return {
            "calls_traced": self.calls,
            "calls_with_swallowed": self.with_swallowed,
            "swallowed": self.swallowed[:8],
        }


class CompilerWatch:
    """Notes which compiler wrappers really compiled something; made before candidate code runs."""

    def __init__(self) -> None:
        self._scripted: list[str] = []
        for owner, name in (
            (torch._C, "_jit_script_compile"), (torch._C, "_create_function_from_trace"),
            (torch._C, "_create_function_from_trace_with_dict"), (torch.jit._recursive, "create_script_module"),
        ):  # fmt: skip
            setattr(owner, name, self._noting(getattr(owner, name), "jit.trace" if "trace" in name else "jit.script"))

    def _noting(self, inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        def noted(*arguments: Any, **keywords: Any) -> Any:
            self._scripted.append(name)
            return inner(*arguments, **keywords)

        return noted

    def used(self) -> list[str]:
        """`torch.compile`, `jit.script`, `jit.trace`: those that compiled at least one graph."""
        found = set(self._scripted)
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is not None and any(vars(dynamo).get("counters", {}).get("stats", {}).values()):
            found.add("torch.compile")
        return sorted(found)
