"""No learning: the policy stays what it is, and only the exemplars in its prompts get better (evolutionary search).

Invariant: what is published is always the very policy that the run began with, whatever the version says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from learner.config import LearnerConfig
from learner.device import resolve_device
from learner.policy import load_policy, merged_weights, save_policy
from learner.sampled import TrainItem

if TYPE_CHECKING:
    from torch import Tensor


class FrozenTrainer:
    """Stands where a trainer stands: each of its steps is a round of the search. It has no optimizer."""

    def __init__(self, config: LearnerConfig, *, seed: int = 0) -> None:
        import torch

        self._config = config
        device = resolve_device(config.device)
        if device == "cpu":
            torch.set_num_threads(config.cpu_threads)
        self._policy = load_policy(config.policy, device, seed=seed)

    def step(self, items: Sequence[TrainItem]) -> dict[str, float]:  # noqa: ARG002
        """Nothing is learned."""
        return {}

    def save(self, folder: Path) -> None:
        """There is nothing to save beside what the learner itself writes."""

    def load(self, folder: Path) -> None:
        """See `save`."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Merged weights under their Hugging Face names."""
        return merged_weights(self._policy.model)

    def export(self, folder: Path) -> Path:
        """Writes adapter or model for `transformers`."""
        return save_policy(self._policy.model, folder, base_name=Path(self._config.policy.model).name)

    def close(self) -> None:
        """Nothing is held."""
