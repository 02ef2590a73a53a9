"""vLLM's weight transfer as versions 0.21 to 0.24 have it: the one module that knows this API.

The engine's side is `TransferReceiver`; the learner's is `send_by_ipc`, which needs the engine on the same device. The
API changed in 0.25 and again in 0.28: an adapter for another generation is another module like this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rollout.engines.base import DeviceTransfer
from tasks.errors import UsageError

if TYPE_CHECKING:
    import torch

FIRST, BEYOND = (0, 21), (0, 25)
"""Versions of vLLM whose transfer has this shape: from FIRST on, below BEYOND."""
ENVIRONMENT = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""CUDA IPC handles reach vLLM's workers pickled; they come from the learner of the same run."""


def engine_arguments() -> dict[str, Any]:
    """Arguments of `vllm.LLM` that switch the transfer on."""
    return {"weight_transfer_config": {"backend": "ipc"}}


def check_version(version: str) -> None:
    """Raises UsageError unless vLLM `version` has this API."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not FIRST <= numbers < BEYOND:
        raise UsageError(
            f"rollout.vllm.weight_transfer = ipc is written for vLLM 0.21 to 0.24, and {version} is installed: "
            "install one of those, or set it to file."
        )


class TransferReceiver:
    """The engine's side: opens, feeds and closes one update of a `vllm.LLM`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        llm.init_weight_transfer_engine({"init_info": {}})

    def begin(self) -> None:
        """Opens an update; weights arrive under checkpoint names."""
        self._llm.start_weight_update(is_checkpoint_format=True)

    def load(self, transfer: DeviceTransfer) -> None:
        """Takes one chunk; the sender keeps its memory until this returns."""
        self._llm.update_weights({"update_info": dict(transfer.update_info)})

    def finish(self) -> None:
        """Closes the update: vLLM finishes what its layers do after loading."""
        self._llm.finish_weight_update()


def send_by_ipc(named_tensors: Iterator[tuple[str, torch.Tensor]], deliver: Callable[[DeviceTransfer], None]) -> None:
    """Gives the tensors' device memory to engines on the same device, in chunks of bounded size.

    `deliver` hands one chunk to every engine (`Engine.load_weights`) and returns when all have taken it. Every rank of
    the learner calls this with full tensors; only rank 0 delivers. It must lie between the engines' `begin_update` and
    `finish_update`.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    IPCWeightTransferEngine.trainer_send_weights(
        named_tensors, {"send_mode": lambda info: deliver(DeviceTransfer(asdict(info))), "packed": True}
    )
