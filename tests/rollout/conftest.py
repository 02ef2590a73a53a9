"""A tiny random Llama with a byte-level tokenizer, and records to prompt it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from rollout.config import PromptConfig, RolloutConfig, SamplingConfig, VllmConfig
from tasks.records import Exemplar, Measurement, Prompt, Task

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")  # a busy machine is no failure of a property

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer Llama with random fp32 weights; 258 tokens: all bytes, start (256), end (257)."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|start|>", eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=258, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=1024, bos_token_id=256, eos_token_id=257,
            tie_word_embeddings=True, initializer_range=0.2,
        )
    )  # fmt: skip
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def changed_weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's weights, each element scaled by its own random factor near 1."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(1)
    state = {
        name: (value * (1 + 0.3 * torch.randn_like(value))).contiguous()
        for name, value in load_file(str(tiny_model / "model.safetensors")).items()
    }
    path = tmp_path_factory.mktemp("changed") / "model.safetensors"
    save_file(state, str(path), metadata={"format": "pt"})
    return path


@pytest.fixture(scope="session")
def tiny_config() -> RolloutConfig:
    """fp32 on CPU, at most 64 + 32 tokens."""
    return RolloutConfig(
        engine="transformers",
        device="cpu",
        dtype="fp32",
        stall_timeout_s=120,
        prompt=PromptConfig(max_tokens=64),
        sampling=SamplingConfig(temperature=0.8, max_tokens=32),
        vllm=VllmConfig(max_sequences=16),
    )


@pytest.fixture(scope="session")
def vllm_engine(tiny_model: Path, tiny_config: RolloutConfig) -> Iterator[Any]:
    """vLLM on the tiny model, started once per session."""
    import asyncio

    pytest.importorskip("vllm", reason="vLLM is not installed")
    from rollout.engines import create_engine

    engine = create_engine(tiny_config.model_copy(update={"engine": "vllm"}), model=tiny_model)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def prompt_of() -> Callable[..., Prompt]:
    """Makes a prompt record of token ids."""

    def make(token_ids: tuple[int, ...], id_: str = "p") -> Prompt:
        return Prompt(id=id_, run_id="r", task_id="t", task_hash="h", device_type="cpu", text="", token_ids=token_ids)

    return make


@pytest.fixture
def task() -> Task:
    """A small reference."""
    return Task(id="file:abc", source="import torch\n\nclass Model(torch.nn.Module):\n    pass\n")


@pytest.fixture
def exemplar_of() -> Callable[..., Exemplar]:
    """Makes an exemplar of a source and a speedup; its hash is its source."""

    def make(source: str, speedup: float) -> Exemplar:
        measurement = Measurement(
            speedup=speedup, ci_low=speedup * 0.9, ci_high=speedup * 1.1, reference_ms=1.0, candidate_ms=1.0, pairs=9
        )
        return Exemplar(
            task_id="file:abc", task_hash="h", device_type="cpu", source=source, candidate_hash=source.strip(),
            speedup=speedup, measurement=measurement,
        )  # fmt: skip

    return make
