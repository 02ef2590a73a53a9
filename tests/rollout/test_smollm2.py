"""The packaged model itself, where its package is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout import RolloutConfig, build_prompt
from rollout.config import PromptConfig
from rollout.model import prepare_model
from rollout.tokenizer import ChatTokenizer
from tasks.errors import UsageError
from tasks.records import Exemplar, Measurement, Task

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Its checkpoint folder, from the cache that the demo uses too."""
    config = RolloutConfig()
    try:
        return prepare_model("smollm2-135m", Path(config.model_cache).expanduser())
    except UsageError as error:
        pytest.skip(str(error))


def test_it_answers(smollm2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = ChatTokenizer.load(smollm2)
    model = AutoModelForCausalLM.from_pretrained(str(smollm2), dtype=torch.float32)
    ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": "What is the capital of France?"}]))
    answer = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :].tolist()
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] == tokenizer.end_token_id == 2, "it stops by itself"


@pytest.mark.parametrize(("style", "limit"), [("torch", 80), ("c", 80), ("triton", 82), ("cuda", 82)])
def test_the_compact_template_costs_few_tokens(smollm2: Path, style: str, limit: int) -> None:
    """Chat template, headings, fences and speedups around the reference and two exemplars."""
    tokenizer = ChatTokenizer.load(smollm2)
    task = Task(id="t", source="class Model:\n    pass")
    measurement = Measurement(speedup=1, ci_low=1, ci_high=1, reference_ms=1, candidate_ms=1, pairs=1)
    exemplars = [
        Exemplar(
            task_id="t", task_hash="h", device_type="cpu", source=f"class ModelNew:\n    x = {i}",
            candidate_hash=str(i), speedup=0.81 + i, measurement=measurement,
        )
        for i in range(2)
    ]  # fmt: skip
    config = RolloutConfig(prompt=PromptConfig.model_validate({"kernel_style": style}))
    prompt = build_prompt(task, exemplars, tokenizer, config, run_id="r", prompt_id="p", device_type="cpu")
    code = sum(tokenizer.count(source) for source in (task.source, *(one.source for one in exemplars)))
    assert len(prompt.token_ids) - code <= limit
    assert prompt.token_ids == tokenizer.encode(prompt.text)
