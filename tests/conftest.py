"""Fixtures that every package's tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

SHARED_VARIABLE = "KONTRAST_SHARED"


def pytest_configure() -> None:
    """Commands that a test starts can be interrupted, also where the tests run in the background of a shell, which
    ignores SIGINT there."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder of the red-team cases and data; skips visibly when the variable is unset, fails when it names nothing."""
    value = os.environ.get(SHARED_VARIABLE)
    if not value:
        pytest.skip(f"{SHARED_VARIABLE} is not set: red-team cases and benchmark data are not at hand")
    folder = Path(value)
    if not folder.is_dir():
        pytest.fail(f"{SHARED_VARIABLE}={value} is not a folder")
    return folder


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a chat template and a tokenizer that was trained on task sources."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tasks import procedural

    folder = tmp_path_factory.mktemp("chat-model")
    tasks = [procedural.generate(family, n, size="cpu") for family in procedural.TRAINING_FAMILIES for n in range(6)]
    texts = [task.source for task in tasks] + [seed.source for task in tasks for seed in procedural.seed_kernels(task)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=backend.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(str(folder))
    return folder
