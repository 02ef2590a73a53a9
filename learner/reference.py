"""A frozen copy of the trained weights, put in place of the live ones while reference log-probabilities are computed.

Invariant: outside `swapped_in` the live weights are the very bits they were before it. Only weights that train are
copied, so with LoRA the reference costs a few megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


class FrozenWeights:
    """The trainable weights of a module as they are now; with ZeRO-3 each rank keeps its own shards."""

    def __init__(self, module: Any) -> None:
        self._copies = [tensor.detach().clone() for tensor in _live(module)]

    @contextmanager
    def swapped_in(self, module: Any) -> Iterator[None]:
        """Computes with the frozen weights inside the block."""
        live = _live(module)
        kept = [tensor.detach().clone() for tensor in live]
        _copy(self._copies, live)
        _forget_gathered(module)
        try:
            yield
        finally:
            _copy(kept, live)
            _forget_gathered(module)


def _live(module: Any) -> list[Tensor]:
    """What holds each trainable weight: the tensor itself, or this rank's shard of it."""
    return [getattr(p, "ds_tensor", p) for p in module.parameters() if p.requires_grad]


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    with torch.no_grad():
        for from_, to in zip(source, target, strict=True):
            to.copy_(from_)


def _forget_gathered(module: Any) -> None:
    """ZeRO-3 keeps small weights whole beside their shards: they must be gathered anew from the shards that changed."""
    for parameter in module.parameters():
        if parameter.requires_grad and hasattr(parameter, "ds_tensor"):
            parameter.partition(has_been_updated=False)
