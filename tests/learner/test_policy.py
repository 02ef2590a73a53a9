from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.batch import TokenSequence, pack, pad
from learner.config import PolicyConfig
from learner.device import cpu_multiplies_bf16, resolve_dtype
from learner.policy import PolicyModule, load_policy, merged_layer, merged_weights, save_policy
from learner.reference import FrozenWeights
from tasks.errors import UsageError


def sequences(seed: int = 0) -> list[TokenSequence]:
    """Two prompts with three completions each, of different lengths."""
    rng = random.Random(seed)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 64) for _ in range(length))

    prompts = [draw(7), draw(4)]
    return [TokenSequence(prompt, draw(length)) for prompt in prompts for length in (5, 1, 9)]


def tiny(folder: Path, **settings: Any) -> PolicyModule:
    return load_policy(PolicyConfig(model=str(folder), dtype="fp32", **settings))


def shake(policy: PolicyModule, seed: int) -> None:
    """Random values for all trainable weights: a fresh adapter changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def test_log_probabilities_equal_those_of_the_plain_model(tiny_model: Path) -> None:
    """Against transformers' own attention and log-softmax, one sequence at a time, at temperature 0.7."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(str(tiny_model), attn_implementation="eager", dtype=torch.float32)
    expected = []
    for sequence in sequences():
        ids = torch.tensor([sequence.prompt_ids + sequence.completion_ids])
        log_all = torch.log_softmax(plain(ids).logits[0] / 0.7, -1)
        first = len(sequence.prompt_ids) - 1
        expected += [log_all[first + i, token].item() for i, token in enumerate(sequence.completion_ids)]
    policy = tiny(tiny_model, lora_rank=0)
    for batch in (pad(sequences()), pack(sequences())):
        torch.testing.assert_close(policy(batch, 0.7)[0], torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_packed_and_padded_gradients_agree(tiny_model: Path) -> None:
    gradients = []
    for layout in (pad, pack):
        policy = tiny(tiny_model, lora_rank=0)
        policy(layout(sequences()))[0].sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_small_logit_chunks_change_nothing(tiny_model: Path) -> None:
    whole, chunked = (tiny(tiny_model, lora_rank=0, logit_rows=rows) for rows in (4096, 3))
    logprobs, entropy = whole(pack(sequences()), 1.0, True)
    other, other_entropy = chunked(pack(sequences()), 1.0, True)
    torch.testing.assert_close(logprobs, other)
    torch.testing.assert_close(entropy, other_entropy)


def test_entropy_of_a_uniform_distribution_is_the_logarithm_of_the_vocabulary(tiny_model: Path) -> None:
    policy = tiny(tiny_model, lora_rank=0)
    _, entropy = policy(pack(sequences()), 1e9, True)
    torch.testing.assert_close(entropy, torch.full_like(entropy, 4.1588831))  # ln 64


def test_a_fresh_adapter_changes_nothing_and_follows_from_its_seed(tiny_model: Path) -> None:
    base, one, two = tiny(tiny_model, lora_rank=0), tiny(tiny_model, lora_rank=4), tiny(tiny_model, lora_rank=4)
    torch.testing.assert_close(base(pack(sequences()))[0], one(pack(sequences()))[0])
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_merged_weights_compute_what_the_adapter_computes(tiny_model: Path) -> None:
    policy, merged = tiny(tiny_model, lora_rank=4), tiny(tiny_model, lora_rank=0)
    shake(policy, 1)
    weights = dict(merged_weights(policy.model))
    assert set(weights) == {name for name, _ in merged.model.named_parameters()}
    before = merged(pack(sequences()))[0]
    merged.model.load_state_dict(weights, strict=False)
    after = merged(pack(sequences()))[0]
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(after, policy(pack(sequences()))[0], rtol=1e-4, atol=1e-4)


def test_two_hundred_publications_equal_a_fresh_merge_bit_for_bit(tiny_model: Path) -> None:
    """In bf16, where merging in place and taking the delta out again would drift."""
    config = PolicyConfig(model=str(tiny_model), dtype="bf16", lora_rank=4)
    long_lived = load_policy(config)
    for publication in range(200):
        shake(long_lived, publication)
        last = dict(merged_weights(long_lived.model))
    fresh = load_policy(config)
    shake(fresh, 199)
    for name, weight in merged_weights(fresh.model):
        assert torch.equal(weight, last[name]), name


def test_a_merge_is_cast_once() -> None:
    """Base 1, delta 2^-9 twice over: in bf16 each alone is lost beside 1 (spacing 2^-7), the fp32 sum is not rounded up
    before the cast either; with four deltas worth 2^-7 together the cast sees them all."""

    class Layer:
        base_layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        active_adapters = ("default",)
        scaling = {"default": 1.0}
        lora_A = {"default": torch.nn.Linear(1, 4, bias=False)}
        lora_B = {"default": torch.nn.Linear(4, 1, bias=False)}

    layer = Layer()
    with torch.no_grad():
        layer.base_layer.weight.fill_(1.0)
        layer.lora_A["default"].weight.fill_(2.0**-9)
        layer.lora_B["default"].weight.fill_(1.0)
    assert merged_layer(layer).item() == 1.0 + 2.0**-7


def test_the_saved_adapter_is_bf16_small_and_loads_again(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    policy = tiny(tiny_model, lora_rank=4)
    shake(policy, 3)
    folder = save_policy(policy.model, tmp_path, base_name="tiny")
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert str(tiny_model) not in (folder / "adapter_config.json").read_text()
    again = tiny(tiny_model, lora_rank=4, adapter=str(folder))
    assert any(p.requires_grad for p in again.parameters())
    torch.testing.assert_close(again(pack(sequences()))[0], policy(pack(sequences()))[0], rtol=0.05, atol=0.05)


def test_frozen_weights_are_used_inside_the_block_only(tiny_model: Path) -> None:
    policy = tiny(tiny_model, lora_rank=4)
    shake(policy, 1)
    frozen, at_first = FrozenWeights(policy), policy(pack(sequences()))[0].detach()
    shake(policy, 2)
    live = [p.detach().clone() for p in policy.parameters()]
    with frozen.swapped_in(policy):
        torch.testing.assert_close(policy(pack(sequences()))[0], at_first)
    assert all(torch.equal(a, b) for a, b in zip(live, policy.parameters(), strict=True))
    assert not torch.allclose(policy(pack(sequences()))[0], at_first, atol=1e-3)


def test_missing_folders_are_said_in_one_sentence(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="no model in"):
        load_policy(PolicyConfig(model=str(tmp_path)))
    with pytest.raises(UsageError, match="no adapter in"):
        tiny(tiny_model, adapter=str(tmp_path))


def test_auto_is_bf16_only_where_it_is_multiplied_natively(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu avx512f avx512vl\n")
    assert not cpu_multiplies_bf16(cpuinfo)
    cpuinfo.write_text("processor : 0\nflags : fpu avx512f avx512_bf16\n")
    assert cpu_multiplies_bf16(cpuinfo)
    assert not cpu_multiplies_bf16(tmp_path / "none")
    assert resolve_dtype("auto", "cuda") == "bf16"
    assert resolve_dtype("fp32", "cuda") == "fp32"
