"""Sampler against trainer on the packaged model: log-probabilities of the same tokens, fp32, at a temperature that is
not 1, through the very code that a run uses on both sides."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.batch import TokenSequence, pack
from learner.config import PolicyConfig
from learner.policy import load_policy
from rollout.config import RolloutConfig, SamplingConfig, VllmConfig
from rollout.engines import Completion, GenerationRequest, create_engine
from rollout.model import prepare_model
from rollout.tokenizer import ChatTokenizer
from tasks.errors import UsageError
from tasks.records import Prompt

pytestmark = pytest.mark.heavy

TEMPERATURE = 0.8
MAX_DIFFERENCE, MEAN_DIFFERENCE = 5e-4, 5e-5
"""Bounds of one token's and of the mean absolute difference, in nats."""
QUESTIONS = ("Write a Python function that adds two numbers.", "Name three colours and say why you like each of them.")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Its checkpoint folder, from the cache that the demo uses too."""
    try:
        return prepare_model("smollm2-135m", Path(RolloutConfig().model_cache).expanduser())
    except UsageError as error:
        pytest.skip(str(error))


def drawn(model: Path, engine_name: str) -> list[tuple[Prompt, Completion]] | None:
    """Two samples of 32 tokens at most for each question; None where the engine does not work."""
    tokenizer = ChatTokenizer.load(model)
    prompts = {}
    for number, question in enumerate(QUESTIONS):
        text = tokenizer.render([{"role": "user", "content": question}])
        prompts[f"p{number}"] = Prompt(
            id=f"p{number}", run_id="r", task_id="t", task_hash="h", device_type="cpu", text=text,
            token_ids=tokenizer.encode(text),
        )  # fmt: skip
    config = RolloutConfig.model_validate({"engine": engine_name}).model_copy(
        update={
            "model": str(model), "device": "cpu", "dtype": "fp32", "vllm": VllmConfig(max_sequences=4),
            "sampling": SamplingConfig(temperature=TEMPERATURE, max_tokens=32, group_size=2),
        }
    )  # fmt: skip
    engine = create_engine(config, model=model)
    if engine.name != engine_name:
        asyncio.run(engine.close())
        return None

    async def run() -> list[Any]:
        found = [one async for one in engine.generate([GenerationRequest(p, (0, 1)) for p in prompts.values()])]
        await engine.close()
        return found

    return [(prompts[one.prompt_id], one) for one in asyncio.run(run())]


@pytest.mark.parametrize("engine_name", ["transformers", "vllm"])
def test_sampler_and_trainer_agree_on_every_token(smollm2: Path, engine_name: str) -> None:
    # In a process of its own: vLLM ends all process groups of its process, and DeepSpeed goes on using those it knew.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pairs = pool.submit(drawn, smollm2, engine_name).result()
    if pairs is None:
        pytest.skip(f"{engine_name} is not installed or does not work here")
    policy = load_policy(PolicyConfig(model=str(smollm2), lora_rank=8, dtype="fp32"))
    sequences = [TokenSequence(prompt.token_ids, one.token_ids) for prompt, one in pairs]
    with torch.no_grad():
        trainer, _ = policy(pack(sequences), TEMPERATURE)
    sampler = torch.cat([torch.tensor(one.logprobs) for _, one in pairs])
    assert len(sampler) > 60, "too few tokens to say anything"
    difference = (trainer - sampler).abs()
    print(
        f"{engine_name}: {len(sampler)} tokens, mean {float(difference.mean()):.2e}, max {float(difference.max()):.2e}"
    )
    assert float(difference.max()) < MAX_DIFFERENCE
    assert float(difference.mean()) < MEAN_DIFFERENCE
