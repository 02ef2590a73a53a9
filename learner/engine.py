"""The policy trainer: DeepSpeed ZeRO 0 to 3, on CPU (gloo) and CUDA (NCCL).

Invariants:
- A loss is normalised over the whole optimizer step by its caller; how the step is split over ranks and micro-batches
  never changes the gradient. DeepSpeed's averaging over ranks is undone here, its averaging over accumulation is off.
- Every rank runs the same number of backward passes in a step, also one that has nothing to train on.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner.batch import TokenBatch, TokenSequence, pad
from learner.config import DeepSpeedConfig, OptimizerConfig
from learner.errors import CheckpointError, NotFiniteError

if TYPE_CHECKING:
    from torch import Tensor

    from learner.policy import PolicyModule

logger = logging.getLogger(__name__)

SHARDS = "shards"
"""Folder of DeepSpeed's files inside a checkpoint."""

TokenLoss = Callable[["Tensor", "Tensor", int], "Tensor"]
"""From log-probabilities `[N]`, entropies `[N]` and the micro-batch's number to its share of the step's loss."""


@dataclass(frozen=True)
class StepReport:
    """One optimizer step: `loss` is this rank's share, `gradient_norm` is global and before clipping."""

    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    micro_batches: int
    seconds: float


def join_process_group(device: str, *, rank: int = 0, world: int = 1, address: str = "", timeout_s: float) -> None:
    """Opens torch's process group unless one is open: DeepSpeed then uses it as it is.

    A single process needs no address; several meet at `address` (`host:port`). Opening it here keeps DeepSpeed from
    passing a device id to it, which makes later communicators hang.
    """
    import torch.distributed as dist

    host, _, port = (address or "127.0.0.1:0").rpartition(":")
    # DeepSpeed reads these also when the group is open already: an engine in this process may have opened it.
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=os.environ.get("LOCAL_RANK", "0"),
        MASTER_ADDR=host, MASTER_PORT=port,
    )  # fmt: skip
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.HashStore() if world == 1 else dist.TCPStore(host, int(port), world, rank == 0, timeout=timeout)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


class PolicyTrainer:
    """A policy with its optimizer; one per rank."""

    def __init__(
        self, policy: PolicyModule, optimizer: OptimizerConfig, deepspeed: DeepSpeedConfig, *, device: str = "cpu"
    ) -> None:
        import torch
        import torch.distributed as dist

        join_process_group(device, timeout_s=deepspeed.timeout_s)
        self.device = device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.steps_done = 0
        self._schedule = optimizer
        trainable = [p for p in policy.parameters() if p.requires_grad]
        adamw = torch.optim.AdamW(
            trainable, lr=optimizer.learning_rate, betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
        )  # fmt: skip
        self.engine = _deepspeed_engine(policy, trainable, adamw, optimizer, deepspeed, device)

    @property
    def policy(self) -> PolicyModule:
        """The trained module, as DeepSpeed keeps it."""
        module: PolicyModule = self.engine.module
        return module

    def logprobs(self, batches: Sequence[TokenBatch], temperature: float = 1.0) -> list[Tensor]:
        """Log-probabilities `[N]` of each batch without gradients."""
        import torch

        with torch.no_grad():
            return [self.engine(batch.to(self.device), temperature)[0] for batch in batches]

    def step(
        self,
        batches: Sequence[TokenBatch],
        token_loss: TokenLoss,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        progress: float = 0.0,
    ) -> StepReport:
        """One optimizer step over the micro-batches; `token_loss` gives each one's share of the step's loss.

        `progress` is the share of the run that is over, which the learning rate's decay follows.
        """
        began = time.perf_counter()
        rate = learning_rate(self._schedule, self.steps_done, progress)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        count, loss_sum = self._most_over_ranks(len(batches)), 0.0
        for number in range(count):
            self.engine.set_gradient_accumulation_boundary(number == count - 1)
            if number < len(batches):
                chosen, entropies = self.engine(batches[number].to(self.device), temperature, entropy)
                loss = token_loss(chosen, entropies, number)
            else:
                # Collectives of the backward pass must stay aligned with the ranks that have more to do.
                loss = self.engine(_anchor_batch().to(self.device), temperature)[0].sum() * 0.0
            loss_sum += float(loss.detach())
            self.engine.backward(loss * self.world)
            norm = self._norm_without_zero() if number == count - 1 else None
            self.engine.step()
        self.steps_done += 1
        norm = float(self.engine.get_global_grad_norm() or 0.0) if norm is None else norm
        if not math.isfinite(norm):
            raise NotFiniteError("the gradient is not finite: these weights are lost, resume from the last checkpoint")
        return StepReport(
            loss=loss_sum, gradient_norm=norm, learning_rate=rate,
            tokens=sum(b.tokens for b in batches), micro_batches=count, seconds=time.perf_counter() - began,
        )  # fmt: skip

    def total_over_ranks(self, *values: float) -> tuple[float, ...]:
        """Sums of the values over all ranks: the normalisers of a step."""
        import torch
        import torch.distributed as dist

        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(totals)
        return tuple(totals.tolist())

    def save(self, folder: Path) -> None:
        """Writes this rank's share of weights, optimizer state and randomness; all ranks call it together.

        Frozen weights are left out: they come from the base model again.
        """
        import torch

        self.engine.save_checkpoint(
            str(folder), tag=SHARDS, client_state={"steps_done": self.steps_done}, save_latest=False,
            exclude_frozen_parameters=True,
        )  # fmt: skip
        state: dict[str, Any] = {
            "layout": self._layout(), "cpu": torch.get_rng_state(), "python": random.getstate(),
        }  # fmt: skip
        if self.device != "cpu":
            state["cuda"] = torch.cuda.get_rng_state()
        torch.save(state, folder / f"rng-{self.rank}.pt")

    def load(self, folder: Path) -> None:
        """Reads back what `save` wrote, at the same number of ranks and ZeRO stage; raises CheckpointError."""
        import torch

        own = folder / f"rng-{self.rank}.pt"
        state: dict[str, Any] = {"layout": "other ranks"}
        if own.is_file():
            state = torch.load(own, weights_only=False)
        if state["layout"] != self._layout():
            raise CheckpointError(
                f"{folder} was written with {state['layout']}, and this learner has {self._layout()}: resume with the "
                "same learner.deepspeed.zero_stage and number of ranks"
            )
        _, client = self.engine.load_checkpoint(str(folder), tag=SHARDS, load_module_strict=False)
        self.steps_done = int(client["steps_done"])
        torch.set_rng_state(state["cpu"])
        random.setstate(state["python"])
        if self.device != "cpu" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])

    def close(self) -> None:
        """Frees the engine; the process group stays open for a next one."""
        self.engine.destroy()

    def _layout(self) -> str:
        return f"ZeRO {self.engine.zero_optimization_stage()} on {self.world} ranks"

    def _norm_without_zero(self) -> float | None:
        """Norm of the gradients that backward has just averaged; None under ZeRO, which computes it in its step."""
        import torch

        if self.engine.zero_optimization_stage() > 0:
            return None
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def _most_over_ranks(self, count: int) -> int:
        import torch
        import torch.distributed as dist

        if self.world == 1:
            return max(count, 1)
        most = torch.tensor([max(count, 1)], device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most.item())


def learning_rate(config: OptimizerConfig, step: int, progress: float) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up times the decay at `progress` (0 to 1, 1 is the end)."""
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    done = min(1.0, max(0.0, progress))
    decay = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[config.decay]
    return config.learning_rate * warm * decay


def _deepspeed_engine(
    policy: PolicyModule, trainable: list[Any], adamw: Any, optimizer: OptimizerConfig, config: DeepSpeedConfig,
    device: str,
) -> Any:  # fmt: skip
    import torch

    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device == "cpu" else "cuda")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Its shared-memory collectives are compiled on first use, which takes a minute and which gloo does not need.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    bf16 = trainable[0].dtype == torch.bfloat16
    zero: dict[str, Any] = {"stage": config.zero_stage}
    if config.offload and config.zero_stage:
        zero["offload_optimizer"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.max_gradient_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "bf16": {"enabled": bf16},
    }
    if bf16 and config.fp32_accumulation and config.zero_stage == 1 and not config.offload:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    engine, *_ = deepspeed.initialize(model=policy, optimizer=adamw, model_parameters=trainable, config=settings)
    return engine


def _anchor_batch() -> TokenBatch:
    return pad([TokenSequence((0,), (0,))], multiple=1)
