"""vLLM, in this process, as a stepper: the CPU build 0.32 and the CUDA build 0.24.

The engine core runs in the calling process (no engine process of vLLM's own), so it lives and dies with its actor, a
failure is an exception here, and tokens are counted between steps. Sampled log-probabilities are the processed ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout.config import RolloutConfig
from rollout.engines import weights_024
from rollout.engines.base import DeviceTransfer, SafetensorsFiles, WeightsError, WeightSource
from rollout.engines.stepped import StepOutput, StepRequest
from tasks.errors import UsageError
from tasks.records.group import FinishReason

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


def environment(config: RolloutConfig, *, on_cpu: bool) -> dict[str, str]:
    """What vLLM reads from the environment when it is imported and started."""
    common = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if on_cpu:
        return common | {
            "VLLM_CPU_KVCACHE_SPACE": str(config.vllm.kv_cache_gib),
            # The process's own threads and affinity hold: vLLM would bind its worker to cores that others use.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(config.cpu_threads),
        }
    extra = weights_024.ENVIRONMENT if config.vllm.weight_transfer == "ipc" else {}
    return common | {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | extra


class VllmStepper:
    """A `vllm.LLM` stepped by hand. `max_context` is the longest prompt and completion together, in tokens."""

    name = "vllm"

    def __init__(
        self, model: Path, config: RolloutConfig, *, on_cpu: bool, dtype: str, stop_ids: Sequence[int]
    ) -> None:
        os.environ.update(environment(config, on_cpu=on_cpu))
        import torch

        if on_cpu:
            torch.set_num_threads(config.cpu_threads)
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self._by_ipc = config.vllm.weight_transfer == "ipc"
        if self._by_ipc:
            weights_024.check_version(vllm.__version__)
        set_num_threads = torch.set_num_threads
        with _kept_environment("LD_PRELOAD"):
            self._llm = vllm.LLM(**_arguments(model, config, on_cpu=on_cpu, dtype=dtype, by_ipc=self._by_ipc))
        torch.set_num_threads = set_num_threads  # the CPU build replaces it for the whole process
        self._core = self._llm.llm_engine
        self._receiver = weights_024.TransferReceiver(self._llm) if self._by_ipc else None
        self._can_sleep = config.vllm.sleep and not on_cpu
        self._seeded = on_cpu
        self._params = vllm.SamplingParams(
            temperature=config.sampling.temperature,
            max_tokens=config.sampling.max_tokens,
            stop_token_ids=list(stop_ids),
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.max_rows = config.vllm.max_sequences

    def admit(self, request: StepRequest) -> None:
        params = self._params.clone()
        if self._seeded:  # a generator per request slows the GPU sampler; there the engine's own seed decides
            params.seed = request.seed
        prompt = {"prompt_token_ids": list(request.prompt_token_ids), "cache_salt": request.cache_salt}
        self._core.add_request(request.id, prompt, params)

    def step(self) -> list[StepOutput]:
        return [_step_output(output.request_id, output.outputs[0]) for output in self._core.step()]

    def abort(self, ids: Sequence[str]) -> None:
        self._core.abort_request(list(ids))

    def begin_update(self) -> None:
        if self._receiver:
            self._receiver.begin()

    def load_weights(self, source: WeightSource) -> None:
        if isinstance(source, DeviceTransfer):
            if not self._receiver:
                raise UsageError("weights came by device memory: set rollout.vllm.weight_transfer = ipc.")
            self._receiver.load(source)
        elif self._receiver:
            raise UsageError("weights came as files: set rollout.vllm.weight_transfer = file.")
        else:
            self._load_files(source)

    def _load_files(self, source: SafetensorsFiles) -> None:
        try:
            self._llm.collective_rpc("load_safetensors", args=([str(path) for path in source.paths],))
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise WeightsError(f"vLLM could not load {', '.join(map(str, source.paths))}: {error}") from error

    def finish_update(self) -> None:
        if self._receiver:
            self._receiver.finish()
        # Refused while samples are in flight; the salt of each version then keeps old prefixes from being reused.
        self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        if self._can_sleep:
            self._llm.sleep(level=1)

    def wake(self) -> None:
        if self._can_sleep:
            self._llm.wake_up()

    def close(self) -> None:
        shutdown = getattr(self._core.engine_core, "shutdown", None)
        if shutdown:
            shutdown()


def _arguments(model: Path, config: RolloutConfig, *, on_cpu: bool, dtype: str, by_ipc: bool) -> dict[str, Any]:
    settings = config.vllm
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": {"bf16": "bfloat16", "fp32": "float32"}[dtype],
        "seed": config.seed,
        "max_model_len": config.context_tokens,
        "max_num_seqs": settings.max_sequences,
        "enforce_eager": not settings.compile,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        # A step in flight while weights change would give its tokens the wrong version.
        "async_scheduling": False,
        "disable_log_stats": True,
        "worker_extension_cls": "rollout.engines.worker_extension.KontrastWorker",
    }
    if on_cpu:
        return arguments | {"distributed_executor_backend": "uni", "block_size": settings.cpu_block_tokens}
    arguments |= {
        "gpu_memory_utilization": settings.gpu_memory_share,
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_sleep_mode": settings.sleep,
    }
    return arguments | (weights_024.engine_arguments() if by_ipc else {})


def _step_output(id_: str, output: Any) -> StepOutput:
    token_ids = tuple(output.token_ids)
    logprobs = tuple(row[token].logprob for token, row in zip(token_ids, output.logprobs or (), strict=True))
    reason = output.finish_reason
    return StepOutput(id_, token_ids, logprobs, None if reason is None else _FINISH.get(reason, "abort"))


@contextmanager
def _kept_environment(*names: str) -> Iterator[None]:
    """vLLM's CPU build sets LD_PRELOAD for workers it would start; other children of this process must not get it."""
    before: Mapping[str, str | None] = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
