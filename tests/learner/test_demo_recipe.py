"""The demo adapter's recipe, from data to samples, on the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parent.parent.parent


def give_tokenizer(folder: Path, to: Path) -> Path:
    """The tiny model again, beside a tokenizer trained on task sources, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tasks import procedural

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
    tokenizer.save_pretrained(str(to))
    config = LlamaConfig.from_pretrained(str(folder), vocab_size=backend.get_vocab_size(), max_position_embeddings=2048)
    LlamaForCausalLM(config).save_pretrained(str(to))
    return to


def test_two_steps_leave_adapter_recipe_curve_and_samples(tiny_model: Path, tmp_path: Path) -> None:
    model, out = give_tokenizer(tiny_model, tmp_path / "model"), tmp_path / "out"
    subprocess.run(
        [
            sys.executable, str(ROOT / "scripts" / "train_demo_adapter.py"), "--model", str(model), "--out", str(out),
            "--steps", "2", "--device", "cpu", "--max-prompt-tokens", "800", "--max-completion-tokens", "400",
            "--rank", "2", "--pairs", "6", "--instances", "40",
        ],
        check=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    recipe = json.loads((out / "recipe.json").read_text())
    assert (out / "adapter" / "adapter_model.safetensors").stat().st_size == recipe["weights_bytes"]
    assert len(recipe["report"]["data_hash"]) == 64
    assert recipe["report"]["steps"] == 2
    assert str(tmp_path) not in json.dumps(recipe)
    assert len((out / "sft.jsonl").read_text().splitlines()) == 2
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2
    for sample in samples:
        assert sample["split"] == "held_out_composition"
        assert {"task", "candidate", "copy", "equals_seed", "completion"} <= set(sample)
