"""vLLM on a GPU: log-probabilities, sleep, and weights by CUDA IPC from another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.actor import generator_actor
from rollout.config import RolloutConfig
from rollout.engines import DeviceTransfer, GenerationRequest
from rollout.engines.weights_024 import BEYOND, FIRST, send_by_ipc
from tasks.records import PolicyVersion, Prompt, Sample

pytestmark = [pytest.mark.gpu, pytest.mark.heavy]
IDS = tuple(range(60, 110))


@pytest.fixture(scope="module")
def actor(tiny_model: Path, tiny_config: RolloutConfig) -> Iterator[tuple[Any, Any]]:
    """Ray, and a generator that takes weights by IPC."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
    if not FIRST <= tuple(int(part) for part in vllm.__version__.split(".")[:2]) < BEYOND:
        pytest.skip(f"vLLM {vllm.__version__} has another weight transfer API")
    ray = pytest.importorskip("ray")
    ours = not ray.is_initialized()
    if ours:
        ray.init(include_dashboard=False, log_to_driver=True, object_store_memory=200 * 2**20)
    settings = tiny_config.vllm.model_copy(update={"weight_transfer": "ipc", "sleep": True, "gpu_memory_share": 0.1})
    config = tiny_config.model_copy(update={"engine": "vllm", "device": "cuda", "dtype": "bf16", "vllm": settings})
    generator = generator_actor().options(num_gpus=0.5).remote(config, str(tiny_model))
    assert ray.get(generator.ready.remote(), timeout=300)["engine"] == "vllm"
    yield ray, generator
    ray.kill(generator)
    if ours:
        ray.shutdown()


def _draw(ray: Any, generator: Any, prompt: Prompt, samples: int) -> list[Sample]:
    stream = generator.generate.options(num_returns="streaming").remote(
        [GenerationRequest(prompt, tuple(range(samples)))]
    )
    return sorted(ray.get(list(stream), timeout=120), key=lambda one: one.index)


def _mean_error(model: Any, samples: list[Sample], temperature: float) -> float:
    """Mean absolute difference of the samples' log-probabilities to a plain forward pass of `model`."""
    import torch

    errors: list[float] = []
    for one in samples:
        ids = torch.tensor([IDS + one.token_ids], device="cuda")
        with torch.no_grad():
            logits = model(ids).logits[0, len(IDS) - 1 : -1].float() / temperature
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(IDS) :, None])[:, 0].cpu()
        errors += (expected - torch.tensor(one.logprobs)).abs().tolist()
    return sum(errors) / len(errors)


def test_weights_arrive_by_ipc_and_survive_sleep(
    actor: tuple[Any, Any], tiny_model: Path, tiny_config: RolloutConfig, prompt_of: Callable[..., Prompt]
) -> None:
    """The engine's log-probabilities follow the learner's model: bf16 noise when equal, far more when not."""
    import torch
    from transformers import AutoModelForCausalLM

    ray, generator = actor
    temperature = tiny_config.sampling.temperature
    model = AutoModelForCausalLM.from_pretrained(str(tiny_model), dtype=torch.bfloat16).cuda().eval()
    samples = _draw(ray, generator, prompt_of(IDS), 16)
    equal = _mean_error(model, samples, temperature)
    assert equal < 0.05
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    different = _mean_error(model, samples, temperature)
    assert different > 5 * equal

    def deliver(chunk: DeviceTransfer) -> None:
        ray.get(generator.load_weights.remote(chunk), timeout=60)

    ray.get(generator.sleep.remote(), timeout=60)
    ray.get(generator.begin_update.remote(), timeout=60)
    send_by_ipc(iter(model.named_parameters()), deliver)
    ray.get(generator.finish_update.remote(PolicyVersion(step=1)), timeout=60)
    updated = _draw(ray, generator, prompt_of(IDS), 16)
    assert updated[0].policy_versions == (PolicyVersion(step=1),)
    assert _mean_error(model, updated, temperature) < 0.05
