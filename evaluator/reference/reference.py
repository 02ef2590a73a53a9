"""The reference module of one task: loaded from its source, constructed, fed with drawn inputs and parameters.

Invariants: inputs are functions of their draw, parameters of their seed alone; the task's code runs only in the reference
server; inputs given to the reference are the server's own, so nothing a candidate writes reaches it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from evaluator.reference.budget import ErrorBudget, LeafBudget
from evaluator.reference.comparison import Leaves
from evaluator.worker import burst, native
from evaluator.worker.tree import flatten, unflatten

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class IllFormedTask(ValueError):
    """The task's source does not follow the convention."""


class Reference:
    """One task, ready to draw inputs and to run its reference model."""

    def __init__(self, namespace: dict[str, Any], precision: str, mode: str, seed: int) -> None:
        self._namespace = namespace
        self.dtype = _DTYPES[precision]
        self.precision = precision
        self.train = mode != "eval"
        self.admission: dict[str, Any] = {}
        self.input_bytes: list[int] = []
        self.output_bytes: list[int] = []
        self._budgets: dict[str, ErrorBudget] = {}
        self.arguments = self._cast(_seeded(seed, namespace["get_init_inputs"]))
        model = _seeded(seed, lambda: namespace["Model"](*self.arguments))
        if not isinstance(model, torch.nn.Module):
            raise IllFormedTask("Model(...) is not a torch.nn.Module")
        self.model = model.to(self.dtype).train(self.train)
        self._constructed = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._spread = {name: _spread(value) for name, value in self.model.named_parameters()}

    @classmethod
    def load(cls, source: str, precision: str, mode: str, seed: int) -> Reference:
        """Runs the task's source. Raises IllFormedTask when a part of the convention is missing."""
        module = types.ModuleType("task")
        exec(compile(source, "task.py", "exec"), module.__dict__)
        for name in ("Model", "get_inputs", "get_init_inputs"):
            if not callable(module.__dict__.get(name)):
                raise IllFormedTask(f"the task defines no {name}")
        return cls(module.__dict__, precision, mode, seed)

    def admit(self, seed: int) -> None:
        """Sizes and call time of the task, and its error budgets."""
        drawn = [self.inputs({"kind": "as_given", "seed": seed + index, "sparse": None}) for index in range(3)]
        self.input_bytes = [native.nbytes_of(tensor) for tensor in flatten(drawn[0], native.is_tensor).tensors]
        results, stamps = burst.run_burst(self.model, drawn)
        self.output_bytes = [t.numel() * t.element_size() for t in flatten(results[0], native.is_tensor).tensors]
        leaves = tuple(
            LeafBudget(path=path, exact=not tensor.is_floating_point(), rms_rel=2e-6, max_rel=1e-5, rms_abs=1e-8)
            for path, tensor in self.answer({"kind": "as_given", "seed": seed, "sparse": None})
        )
        self._budgets = {"as_given": ErrorBudget(leaves=leaves, oracle="assumed")}
        self.admission = {"call_ms": (stamps[3] - stamps[1]) / 2e6, "degenerate": [], "kinds": ["as_given"],
                          "leaves": len(self.input_bytes) + len(self.output_bytes)}

    def budget(self, kind: str) -> ErrorBudget:
        """The error budget of one kind of draw."""
        return self._budgets[kind]

    def inputs(self, draw: dict[str, Any]) -> list[Any]:
        """The inputs of one call."""
        inputs = self._drawn(int(draw["seed"]))
        if draw["sparse"] is not None:
            _mix(inputs, self._drawn(int(draw["sparse"])), int(draw["sparse"]))
        return inputs

    def _drawn(self, seed: int) -> list[Any]:
        inputs = _seeded(seed, self._namespace["get_inputs"])
        if not isinstance(inputs, list | tuple):
            raise IllFormedTask("get_inputs() does not return a list")
        return list(self._cast(list(inputs)))

    def answer(self, draw: dict[str, Any]) -> Leaves:
        """The reference's output on a draw, under the parameters of now."""
        with torch.no_grad():
            flat = flatten(self.model(*self.inputs(draw)), native.is_tensor)
        return list(zip(flat.paths, flat.tensors, strict=True))

    def set_parameters(self, seed: int | None) -> None:
        """Parameters and buffers as constructed; with a seed all floating parameters random at their scale."""
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(self._constructed[name])
            if seed is None:
                return
            generator = torch.Generator().manual_seed(seed)
            for name, parameter in self.model.named_parameters():
                if parameter.is_floating_point():
                    centre, spread = self._spread[name]
                    parameter.copy_(torch.empty(parameter.shape).normal_(centre, spread, generator=generator))

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        return dict(self.model.state_dict())

    def _cast(self, value: Any) -> Any:
        """Floating tensors in the task's dtype, dense; all else as it is."""
        flat = flatten(value, native.is_tensor)
        cast = [t.detach().to(self.dtype) if t.is_floating_point() else t.detach() for t in flat.tensors]
        return unflatten(flat.form, [_dense(tensor) for tensor in cast])


def _seeded(seed: int, make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if native.dense(tuple(tensor.shape), tensor.stride()) else tensor.contiguous()


def _spread(parameter: torch.Tensor) -> tuple[float, float]:
    """Centre and spread of random values for a parameter: those that it was constructed with, never a constant."""
    values = parameter.detach().float()
    if not values.numel():
        return 0.0, 1.0
    centre = values.mean().item()
    scale = values.std().item() if values.numel() > 1 else 0.0
    return centre, max(scale, 0.25 * abs(centre), 0.05 if scale == 0.0 else 0.0)


def _mix(inputs: list[Any], others: list[Any], seed: int) -> None:
    """Replaces about one element in 256 of every floating input by the other draw's, in place."""
    generator = torch.Generator().manual_seed(seed)
    pairs = zip(flatten(inputs, native.is_tensor).tensors, flatten(others, native.is_tensor).tensors, strict=True)
    for tensor, other in pairs:
        if tensor.is_floating_point() and tensor.numel():
            count = max(1, tensor.numel() // 256)
            places = torch.randint(tensor.numel(), (count,), generator=generator)
            tensor.view(-1)[places] = other.reshape(-1)[places]
