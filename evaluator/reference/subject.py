"""The reference as admission, oracle and domain see it: a module, a way to draw inputs, and runs without side effects.

Invariants: a run never changes the caller's inputs, the module's parameters or its buffers; a draw depends on its seed
alone and leaves the process's random state as it was; outputs come back as (path, tensor) pairs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from evaluator.reference.comparison import all_finite

Leaves = list[tuple[str, torch.Tensor]]


@dataclass
class Subject:
    """A reference module with its inputs. `make_inputs` is the task's `get_inputs`."""

    module: torch.nn.Module
    make_inputs: Callable[[], Sequence[Any]]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _infinite: Leaves | None = field(default=None, repr=False)
    _probed: bool = field(default=False, repr=False)

    def draw(self, seed: int) -> list[Any]:
        """Inputs under a seed, on the device; tasks that insist on creation on the CPU are moved."""
        with seeded(seed, self.device), torch.device(self.device):
            values = list(self.make_inputs())
        return [map_tensors(value, lambda tensor: tensor.to(self.device)) for value in values]

    def run(self, inputs: Sequence[Any], state: Mapping[str, torch.Tensor] | None = None, *, seed: int = 0) -> Leaves:
        """Outputs for inputs, under `no_grad`, with the module's own or the given state; the seed is dropout's."""
        return run_module(self.module, inputs, state, seed=seed, device=self.device)

    def stays_finite(self, outputs: Leaves, inputs: Sequence[Any]) -> bool:
        """Whether outputs are finite wherever those of `inputs`, under the parameters of the first such question, are.

        References with infinities of their own (masked scores) are rare: their places are remembered once.
        """
        if all(all_finite(leaf) for _, leaf in outputs):
            return True
        if not self._probed:
            plain = self.run(inputs)
            self._probed = True
            self._infinite = None if all(all_finite(leaf) for _, leaf in plain) else plain
        if self._infinite is None or [leaf.shape for _, leaf in outputs] != [leaf.shape for _, leaf in self._infinite]:
            return False
        pairs = zip(outputs, self._infinite, strict=True)
        return all(bool((torch.isfinite(new) | ~torch.isfinite(old)).all()) for (_, new), (_, old) in pairs)


def load_subject(source: str, *, seed: int = 0, device: str = "cpu", name: str = "Model") -> Subject:
    """A subject from a task's source (trusted: tasks are the user's own). Raises whatever the source raises."""
    namespace: dict[str, Any] = {"__name__": "task"}
    exec(compile(source, "<task>", "exec"), namespace)
    place = torch.device(device)
    with seeded(seed, place), torch.device(place):
        module = namespace[name](*namespace["get_init_inputs"]()).to(place)
    return Subject(module, namespace["get_inputs"], place)


def run_module(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    state: Mapping[str, torch.Tensor] | None = None,
    *,
    seed: int = 0,
    device: torch.device | None = None,
) -> Leaves:
    """Runs a module on copies of the inputs; parameters and buffers are as before afterwards."""
    own = dict(module.state_dict(keep_vars=True))
    kept = {name: value.detach().clone() for name, value in module.state_dict().items()}
    try:
        with torch.no_grad(), seeded(seed, device or torch.device("cpu")):
            if state is not None:
                for name, value in state.items():
                    own[name].copy_(value)
            return leaves_of(module(*[map_tensors(value, torch.clone) for value in inputs]))
    finally:
        with torch.no_grad():
            for name, value in kept.items():
                own[name].copy_(value)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A nested value with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def leaves_of(value: Any) -> Leaves:
    """The tensors of a nested value with their paths; a bare tensor has path `0`."""
    found: Leaves = []
    _collect(value, (), found)
    return found


def _collect(value: Any, path: tuple[str, ...], found: Leaves) -> None:
    if isinstance(value, torch.Tensor):
        found.append((".".join(path) or "0", value.detach()))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            _collect(item, (*path, str(place)), found)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(item, (*path, str(key)), found)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's random state set from a seed (any integer) for the length of a block, then as before."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed % (1 << 63))
        yield
