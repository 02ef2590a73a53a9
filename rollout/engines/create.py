"""Makes the engine that the configuration asks for, or the one that works here."""

from __future__ import annotations

import logging
from pathlib import Path

from rollout.config import RolloutConfig
from rollout.engines.base import Engine
from rollout.engines.stepped import SteppedEngine, Stepper, StepRequest
from rollout.model import prepare_model
from rollout.tokenizer import ChatTokenizer, stop_token_ids
from tasks.errors import UsageError
from tasks.records.group import PolicyVersion

log = logging.getLogger(__name__)


def create_engine(config: RolloutConfig, *, model: Path | None = None, version: PolicyVersion | None = None) -> Engine:
    """A running engine; loading takes seconds to a minute.

    `model` is a checkpoint folder with full weights (default: `config.model`, converted if needed); `version` is what
    these weights are. Where vLLM cannot be imported, started, or cannot draw one token, transformers takes its place
    and the log says so. Raises UsageError for a device or model that is not there.
    """
    if config.engine == "openai":
        from rollout.engines.openai import OpenAIEngine

        return OpenAIEngine(config.openai, config.sampling)
    folder = model or prepare_model(config.model, Path(config.model_cache).expanduser())
    return SteppedEngine(
        lambda: _stepper(folder, config),
        ChatTokenizer.load(folder).decode,
        version=version or PolicyVersion(),
        seed=config.seed,
        stall_timeout_s=config.stall_timeout_s,
    )


def _stepper(folder: Path, config: RolloutConfig) -> Stepper:
    device = pick_device(config)
    dtype = pick_dtype(config, device)
    stop_ids = stop_token_ids(folder)
    if config.engine == "vllm":
        try:
            from rollout.engines.vllm import VllmStepper

            stepper: Stepper = VllmStepper(folder, config, on_cpu=device == "cpu", dtype=dtype, stop_ids=stop_ids)
            probe(stepper, first_token=stop_ids[0])
            return stepper
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001  whatever keeps vLLM from working, transformers may still work
            log.warning(
                "vLLM does not work here (%s: %s), so the transformers engine takes its place, which is slower.",
                type(error).__name__,
                " ".join(str(error).split())[:300],
            )
    from rollout.engines.transformers import TransformersStepper

    return TransformersStepper(folder, config, device=device, dtype=dtype, stop_ids=stop_ids)


def probe(stepper: Stepper, first_token: int) -> None:
    """Draws one token; raises whatever the stepper raises."""
    stepper.admit(StepRequest("probe", (first_token,), seed=0, cache_salt="probe"))
    if not stepper.step():
        raise RuntimeError("the first step gave no token")
    stepper.abort(["probe"])


def pick_device(config: RolloutConfig) -> str:
    """`cpu` or `cuda`; raises UsageError where CUDA is asked for and absent."""
    import torch

    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise UsageError("rollout.device = cuda, but PyTorch sees no CUDA device here: set it to cpu or auto.")
    return "cuda"


def pick_dtype(config: RolloutConfig, device: str) -> str:
    """`bf16` or `fp32`. Without native bf16 products a processor is several times slower in bf16 than in fp32."""
    if config.dtype != "auto":
        return config.dtype
    return "bf16" if device == "cuda" or _cpu_multiplies_bf16() else "fp32"


def _cpu_multiplies_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
