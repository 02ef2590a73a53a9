"""One rank of stage 1 as a Ray actor: a thin shell around `sft.train`.

Invariant: all ranks read the same file of pairs and call the trainer in the same order; the first one alone writes.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from learner.actor import free_address
from learner.checkpoint import CheckpointFolder
from learner.config import LearnerConfig
from learner.sft import SftCheckpoints, SftReport, train
from learner.sft_pairs import read_pairs

REPORT = "report.json"
"""File of the stage's folder that says what it came to; written last."""


class SftRank:
    """What the actor does, without Ray."""

    def __init__(self, config: LearnerConfig, folder: str, pairs: str, run_id: str, *, rank: int, world: int) -> None:
        """`folder` is the stage's; `pairs` the file that `sft_pairs.load_or_build` wrote."""
        self._config, self._folder, self._pairs, self._run_id = config, Path(folder), Path(pairs), run_id
        self._rank, self._world = rank, world

    def address(self) -> str:
        """Where the ranks can meet: asked of the first one."""
        return free_address()

    def pid(self) -> int:
        """The process of the actor."""
        return os.getpid()

    def run(self, address: str) -> dict[str, Any]:
        """Trains to the end, from the latest checkpoint where there is one; returns the report."""
        import torch

        from learner.device import resolve_device
        from learner.engine import PolicyTrainer, join_process_group
        from learner.policy import load_policy

        config = self._config
        device = resolve_device(config.device)
        if device == "cpu":
            torch.set_num_threads(config.cpu_threads)
        join_process_group(
            device, rank=self._rank, world=self._world, address=address, timeout_s=config.deepspeed.timeout_s
        )
        policy = load_policy(config.policy, device, seed=config.sft.data.seed)
        trainer = PolicyTrainer(policy, config.sft.optimizer, config.deepspeed, device=device)
        pairs, _ = read_pairs(self._pairs)
        report = train(
            trainer, pairs.train, pairs.held_out, config.sft, self._folder, row_tokens=config.deepspeed.row_tokens,
            checkpoints=SftCheckpoints(
                CheckpointFolder(self._folder / "checkpoints", keep=config.checkpoint.keep), self._run_id
            ),
        )  # fmt: skip
        trainer.close()
        return self._reported(report, pairs.left_out)

    def _reported(self, report: SftReport, left_out: Any) -> dict[str, Any]:
        values = {**asdict(report), "demonstrations_left_out": dict(left_out)}
        if self._rank == 0:
            partial = self._folder / f".{REPORT}"
            partial.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
            partial.replace(self._folder / REPORT)
        return values


def sft_actor() -> Any:
    """The Ray actor class; make one by `sft_actor().options(...).remote(config, folder, pairs, run_id, ...)`."""
    import ray

    return ray.remote(SftRank)
