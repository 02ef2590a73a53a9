"""The trainer of one rank, and how the first rank leads the others.

Invariants: every rank does the same calls in the same order with the same arguments, since each is a collective; only
the first rank talks to the store and to the engines. A single rank sends nothing.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner.config import LearnerConfig
from learner.contrastive import grpo_step
from learner.device import resolve_device
from learner.engine import PolicyTrainer, join_process_group
from learner.policy import load_policy, merged_weights, save_policy
from learner.reference import FrozenWeights
from learner.sampled import TrainItem
from learner.self_supervised import reinforce_step

if TYPE_CHECKING:
    from torch import Tensor

IDLE = datetime.timedelta(days=7)
"""Longest wait of a follower for its next call: the leader may wait that long for samples."""


class RankTrainer:
    """Policy, optimizer and reference of one rank."""

    def __init__(
        self, config: LearnerConfig, *, rank: int = 0, world: int = 1, address: str = "", seed: int = 0
    ) -> None:
        import torch

        self._config = config
        device = resolve_device(config.device)
        if device == "cpu":
            torch.set_num_threads(config.cpu_threads)
        join_process_group(
            device, rank=rank, world=world, address=address, timeout_s=config.deepspeed.timeout_s
        )  # fmt: skip
        policy = load_policy(config.policy, device, seed=seed)
        self._trainer = PolicyTrainer(policy, config.optimizer, config.deepspeed, device=device)
        regularized = config.stage == "contrastive" and config.grpo.kl_weight > 0
        self._reference = FrozenWeights(self._trainer.policy) if regularized else None
        self._calls = _open_calls(world)

    def step(self, items: Sequence[TrainItem]) -> dict[str, float]:
        """One batch of the stage; see `reinforce_step` and `grpo_step`."""
        row_tokens, temperature = self._config.deepspeed.row_tokens, self._config.temperature
        if self._config.stage == "self_supervised":
            return reinforce_step(
                self._trainer, items, self._config.self_supervised, row_tokens=row_tokens, temperature=temperature
            )
        return grpo_step(
            self._trainer, items, self._config.grpo, row_tokens=row_tokens, temperature=temperature,
            reference=self._reference,
        )  # fmt: skip

    def save(self, folder: Path) -> None:
        """This rank's share of a checkpoint."""
        self._trainer.save(folder)

    def load(self, folder: Path) -> None:
        """Reads it back; the reference stays what the run began with."""
        self._trainer.load(folder)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Merged weights under their Hugging Face names."""
        return merged_weights(self._trainer.policy.model)

    def export(self, folder: Path) -> Path:
        """Writes adapter or model for `transformers`; one rank, or weights that are not sharded."""
        return save_policy(self._trainer.policy.model, folder, base_name=Path(self._config.policy.model).name)

    def drain(self, _: None = None) -> None:
        """A follower's part of `weights`: the gathering alone."""
        for _tensor in self.weights():
            pass

    def follow(self) -> None:
        """Serves a rank other than the first until the leader closes."""
        while True:
            name, argument = self._receive()
            if name == "close":
                return
            getattr(self, name)(argument)

    def close(self) -> None:
        """Frees the engine."""
        self._trainer.close()

    def call(self, name: str, argument: Any = None) -> None:
        """The leader tells the followers what comes next."""
        if self._calls is not None:
            import torch.distributed as dist

            dist.broadcast_object_list([name, argument], src=0, group=self._calls)

    def _receive(self) -> tuple[str, Any]:
        import torch.distributed as dist

        box: list[Any] = [None, None]
        dist.broadcast_object_list(box, src=0, group=self._calls)
        return box[0], box[1]


class LeadingTrainer:
    """The first rank's trainer as the learner sees it: each call goes to all ranks."""

    def __init__(self, own: RankTrainer) -> None:
        self._own = own

    def step(self, items: Sequence[TrainItem]) -> dict[str, float]:
        """See RankTrainer."""
        self._own.call("step", list(items))
        return self._own.step(items)

    def save(self, folder: Path) -> None:
        """See RankTrainer."""
        self._own.call("save", folder)
        self._own.save(folder)

    def load(self, folder: Path) -> None:
        """See RankTrainer."""
        self._own.call("load", folder)
        self._own.load(folder)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See RankTrainer; must be read to its end."""
        self._own.call("drain")
        return self._own.weights()

    def export(self, folder: Path) -> Path:
        """See RankTrainer."""
        return self._own.export(folder)

    def close(self) -> None:
        """Ends all ranks."""
        self._own.call("close")
        self._own.close()


def _open_calls(world: int) -> Any:
    """A group of its own for calls, on gloo: waiting for samples must not run into a collective's time limit."""
    if world == 1:
        return None
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=IDLE)
