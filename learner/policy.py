"""The policy as a torch module: loading, LoRA, log-probabilities of chosen tokens, merged weights.

Invariants: logits exist only for completion tokens; the base weights are never written after loading, so a merge is a
function of base and adapter alone, whatever was merged before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from learner.attention import register
from learner.batch import TokenBatch
from learner.config import PolicyConfig
from learner.device import resolve_dtype
from tasks.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DECODER_LAYER = re.compile(r".*?\.layers\.\d+\.")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class PolicyModule(nn.Module):
    """Log-probabilities of the targets of a batch, `[N]` in fp32, at a sampling temperature."""

    def __init__(self, model: PreTrainedModel, *, logit_rows: int = 4096, fp32_logits: bool = True) -> None:
        super().__init__()
        self.model = model
        self._logit_rows = logit_rows
        self._fp32_logits = fp32_logits

    def forward(self, batch: TokenBatch, temperature: float = 1.0, entropy: bool = False) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities and, where asked, entropies of the full distributions (no gradient): `[N]`, nats.

        Without `entropy` the second tensor is empty.
        """
        causal = self.causal_lm
        output = causal.base_model(
            input_ids=batch.input_ids_bt, position_ids=batch.position_ids_bt, attention_mask=None, use_cache=False,
            segments=batch.segments,
        )  # fmt: skip
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, batch.source_n)
        head = causal.get_output_embeddings()
        parts = [
            self._chunk(head(rows), targets, temperature, entropy)
            for rows, targets in zip(
                hidden.split(self._logit_rows), batch.target_n.split(self._logit_rows), strict=True
            )
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _chunk(self, logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        if self._fp32_logits:
            logits = logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        log_all = torch.log_softmax(logits, dim=-1)
        chosen = log_all.gather(1, targets.unsqueeze(1)).squeeze(1).float()
        if not entropy:
            return chosen, chosen.new_empty(0)
        with torch.no_grad():
            return chosen, -(log_all.exp() * log_all).sum(-1).float()

    @property
    def causal_lm(self) -> Any:
        """The Hugging Face model under the adapter, if any."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model


def load_policy(config: PolicyConfig, device: str = "cpu", *, seed: int = 0) -> PolicyModule:
    """Loads base model and adapter; raises UsageError when a folder is missing or the model is of an unknown kind."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not (Path(config.model) / "config.json").is_file():
        raise UsageError(f"no model in {config.model!r}: name a folder with config.json and *.safetensors")
    model = AutoModelForCausalLM.from_pretrained(
        config.model,
        dtype=DTYPES[resolve_dtype(config.dtype, device)],
        attn_implementation=register(),
        local_files_only=True,
    )
    return wrap_policy(model.to(device), config, seed=seed)


def wrap_policy(model: Any, config: PolicyConfig, *, seed: int = 0) -> PolicyModule:
    """Adds the adapter (a fresh one follows from `seed`) and the log-probability head to a loaded model."""
    if getattr(model.config, "final_logit_softcapping", None):
        raise UsageError("this model caps its logits, which the learner does not compute: choose another model")
    model.config.use_cache = False
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.lora_rank:
        model = _with_adapter(model, config, seed)
        if config.gradient_checkpointing:
            model.enable_input_require_grads()
    model.train()
    return PolicyModule(model, logit_rows=config.logit_rows, fp32_logits=config.fp32_logits)


def _with_adapter(model: Any, config: PolicyConfig, seed: int) -> Any:
    import peft

    if config.adapter:
        if not (Path(config.adapter) / "adapter_config.json").is_file():
            raise UsageError(f"no adapter in {config.adapter!r}: name a folder with adapter_config.json")
        return peft.PeftModel.from_pretrained(model, config.adapter, is_trainable=True, autocast_adapter_dtype=False)
    lora = peft.LoraConfig(
        r=config.lora_rank, lora_alpha=cast(int, config.lora_alpha), lora_dropout=0.0,
        target_modules="all-linear", task_type="CAUSAL_LM",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(model, lora, autocast_adapter_dtype=False)


def save_policy(model: Any, folder: Path, *, base_name: str) -> Path:
    """Writes `folder/adapter`, or `folder/model` when every weight was trained; returns it."""
    if hasattr(model, "get_base_model"):
        save_adapter(model, folder / "adapter", base_name=base_name)
        return folder / "adapter"
    model.save_pretrained(str(folder / "model"))
    return folder / "model"


def save_adapter(model: Any, folder: Path, *, base_name: str, dtype: torch.dtype | None = torch.bfloat16) -> Path:
    """Writes the adapter alone, as safetensors (bf16, or `dtype`, or for None as it is) and its config; returns the
    weights' path.

    `base_name` is what the adapter's config calls its base model, so that no local path need be written.
    """
    import peft
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    # Its search for new words of the vocabulary would ask a model hub; an adapter on linear layers has none.
    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {name: t.detach().to("cpu", dtype or t.dtype).contiguous() for name, t in sorted(state.items())}
    path = folder / "adapter_model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    written = model.peft_config["default"]
    kept = written.base_model_name_or_path, written.inference_mode
    written.base_model_name_or_path, written.inference_mode = base_name, True
    try:
        written.save_pretrained(str(folder))
    finally:
        written.base_model_name_or_path, written.inference_mode = kept
    return path


def merged_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its Hugging Face name, LoRA deltas added in fp32 and cast once.

    Yields new tensors for merged layers and the live ones for the rest: copy before the next optimizer step. Weights
    that ZeRO-3 has sharded are gathered one decoder layer at a time, on all ranks together, and yielded as copies.
    """
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    lora = {name: module for name, module in causal.named_modules() if hasattr(module, "lora_A")}
    groups: dict[str, list[tuple[str, Any]]] = {}
    for name, parameter in causal.named_parameters():
        layer = _DECODER_LAYER.match(name)
        groups.setdefault(layer[0] if layer else name, []).append((name, parameter))
    for members in groups.values():
        sharded = any(hasattr(parameter, "ds_id") for _, parameter in members)
        with _gathered([parameter for _, parameter in members]) if sharded else nullcontext():
            for name, parameter in members:
                if ".lora_" in name:
                    continue
                owner, _, leaf = name.rpartition(".")
                layer = lora.get(owner.removesuffix(".base_layer")) if leaf == "weight" else None
                weight = parameter if layer is None else merged_layer(layer)
                yield name.replace(".base_layer.", "."), weight.detach().clone() if sharded else weight


def _gathered(parameters: list[Any]) -> AbstractContextManager[None]:
    from deepspeed import zero

    context: AbstractContextManager[None] = zero.GatheredParameters(parameters)
    return context


def merged_layer(layer: Any) -> Tensor:
    """Base weight plus scaled delta of one LoRA layer, computed in fp32, in the base weight's format."""
    base = layer.base_layer.weight
    with torch.no_grad():
        total = base.float()
        for name in layer.active_adapters:
            delta = layer.lora_B[name].weight.float() @ layer.lora_A[name].weight.float()
            total = total + layer.scaling[name] * delta
        return total.to(base.dtype)
