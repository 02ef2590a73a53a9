"""The policy of a checkpoint as a folder that `transformers` loads: the adapter, or the whole model with it merged.

Invariants: the weights are those of the checkpoint, whatever the ZeRO stage and the number of ranks that wrote it; no
optimizer, process group or device is needed; the folder appears whole or not at all, with the tokenizer in it.
"""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from learner.config import PolicyConfig
from learner.engine import SHARDS
from learner.errors import CheckpointError
from tasks.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from learner.policy import PolicyModule

Kind = Literal["adapter", "merged"]
MODEL_FILES = ("generation_config.json", "chat_template.jinja")
"""What goes with a model beside its weights, its configuration and its tokenizer."""


def export_policy(
    policy: PolicyConfig, checkpoint: Path | None, out: Path, kind: Kind, *, seed: int = 0, dtype: str = ""
) -> Path:
    """Writes the policy of a checkpoint (None: as it began) to the new folder `out`; returns it.

    An adapter names the base model's folder as `policy.model` does. `dtype` (`bf16`, `fp32`) casts what is written;
    empty keeps the format that was trained in. Raises UsageError when there is no adapter to write or `out` is taken,
    CheckpointError when the checkpoint does not hold this policy.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already: name a new folder")
    if kind == "adapter" and not (policy.lora_rank or policy.adapter):
        raise UsageError("this run trains every weight (learner.policy.lora_rank = 0), so it has a merged model alone")
    module = load_trained(policy, checkpoint, seed=seed)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        if kind == "adapter":
            _write_adapter(module.model, partial, policy.model, dtype)
        else:
            _write_merged(module, partial, dtype)
        _copy_tokenizer(Path(policy.model), partial, with_model=kind == "merged")
        for path in partial.iterdir():
            path.chmod(0o644)
        if out.is_dir():
            out.rmdir()
        os.rename(partial, out)
    except OSError as error:
        raise UsageError(
            f"{out} cannot be written ({error.strerror}): name another folder, or free some space"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def load_trained(policy: PolicyConfig, checkpoint: Path | None, *, seed: int = 0) -> PolicyModule:
    """The policy on CPU with a checkpoint's weights in it. Raises CheckpointError when they do not fit."""
    from learner.policy import load_policy

    module = load_policy(policy, "cpu", seed=seed)
    if checkpoint is None or not (checkpoint / SHARDS).is_dir():
        return module  # nothing was trained
    found = trained_weights(checkpoint)
    expected = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    missing, unexpected = expected - found.keys(), found.keys() - module.state_dict().keys()
    if missing or unexpected:
        raise CheckpointError(
            f"{checkpoint} holds another policy: {len(missing)} weights are missing and {len(unexpected)} unknown; "
            "give the learner.policy that it was trained with"
        )
    try:
        module.load_state_dict(found, strict=False)
    except RuntimeError as error:
        raise CheckpointError(
            f"{checkpoint} holds weights of other shapes: give the learner.policy that it was trained with"
        ) from error
    return module


def trained_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The trained weights in a checkpoint by their names in the policy module. Raises CheckpointError."""
    import torch

    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # reading its files wakes DeepSpeed, which then looks for devices
    shards = checkpoint / SHARDS
    whole = shards / "mp_rank_00_model_states.pt"
    try:
        if whole.is_file():
            state: dict[str, Tensor] = torch.load(whole, map_location="cpu", weights_only=False)["module"]
            return state
        # ZeRO-3 shards the weights themselves; its fp32 copies hold them to the last bit.
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        gathered: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(
            str(checkpoint), tag=SHARDS, exclude_frozen_parameters=True
        )
        return gathered
    except (OSError, EOFError, KeyError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"the weights in {checkpoint} cannot be read ({error}): export another checkpoint"
        ) from error


def _write_adapter(model: Any, folder: Path, base: str, dtype: str) -> None:
    from learner.policy import DTYPES, save_adapter

    save_adapter(model, folder, base_name=base, dtype=DTYPES[dtype] if dtype else None)


def _write_merged(module: PolicyModule, folder: Path, dtype: str) -> None:
    """The base model's weights are replaced by the merged ones, layer by layer: what is in memory is thrown away."""
    from learner.policy import DTYPES, merged_layer

    causal = module.causal_lm
    for layer in [layer for layer in causal.modules() if hasattr(layer, "lora_A")]:
        layer.base_layer.weight.data = merged_layer(layer)
    plain = module.model.unload() if hasattr(module.model, "unload") else causal
    if dtype:
        plain = plain.to(DTYPES[dtype])
    plain.config.use_cache = True
    plain.save_pretrained(str(folder))


def _copy_tokenizer(model: Path, folder: Path, *, with_model: bool) -> None:
    names = [path.name for path in model.glob("*token*")] + ["vocab.json", "merges.txt", "special_tokens_map.json"]
    for name in [*names, *(MODEL_FILES if with_model else MODEL_FILES[1:])]:
        if (model / name).is_file() and not (folder / name).exists():
            shutil.copyfile(model / name, folder / name)
