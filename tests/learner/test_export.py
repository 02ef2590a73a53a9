"""The exported folder against the policy it came from: what `transformers` computes from it is what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.batch import TokenSequence, pad
from learner.checkpoint import CheckpointFolder, LearnerState
from learner.config import DeepSpeedConfig, OptimizerConfig, PolicyConfig
from learner.engine import PolicyTrainer
from learner.errors import CheckpointError
from learner.export import export_policy
from learner.policy import load_policy
from tasks.errors import UsageError
from tasks.records import PolicyVersion

pytestmark = pytest.mark.heavy
IDS = (3, 9, 27, 17, 51, 25, 11)


def trained(policy: PolicyConfig, folder: Path, *, zero_stage: int = 1) -> tuple[Path, torch.Tensor]:
    """A checkpoint after two steps, and the log-probabilities that the trainer gives afterwards."""
    run = PolicyTrainer(
        load_policy(policy), OptimizerConfig(learning_rate=1e-2), DeepSpeedConfig(zero_stage=zero_stage), device="cpu"
    )
    batch = pad([TokenSequence(IDS[:3], IDS[3:])])
    for _ in range(2):
        run.step([batch], lambda logprobs, _entropy, _number: -logprobs.sum())
    (logprobs,) = run.logprobs([batch])
    checkpoints = CheckpointFolder(folder / "checkpoints", keep=1)
    state = LearnerState(run_id="r", version=PolicyVersion(step=2), starts={0: 0}, fates={})
    run.save(checkpoints.begin(state.version))
    run.close()
    return checkpoints.complete(state).folder, logprobs


def logprobs_of(model: Any) -> torch.Tensor:
    """The same quantity by plain transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0, 2:-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor([IDS[3:]]).T).squeeze(1)


def begun(policy: PolicyConfig) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return logprobs_of(AutoModelForCausalLM.from_pretrained(policy.model))


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("rank", [4, 0])
def test_the_merged_model_computes_what_the_trainer_computed(
    tiny_model: Path, tmp_path: Path, zero_stage: int, rank: int
) -> None:
    from transformers import AutoModelForCausalLM

    policy = PolicyConfig(model=str(tiny_model), lora_rank=rank, dtype="fp32")
    checkpoint, expected = trained(policy, tmp_path, zero_stage=zero_stage)
    out = export_policy(policy, checkpoint, tmp_path / "out", "merged")
    model = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logprobs_of(model), expected, rtol=1e-5, atol=1e-5)
    assert (begun(policy) - expected).abs().max() > 0.05, "training changed nothing: the test proves nothing"
    config = json.loads((out / "config.json").read_text())
    assert config["use_cache"]
    assert {oct(path.stat().st_mode & 0o777) for path in out.iterdir()} == {"0o644"}
    assert "kontrast" not in json.dumps(config)


@pytest.mark.parametrize("loader", ["transformers", "peft"])
def test_the_adapter_computes_what_the_trainer_computed(tiny_model: Path, tmp_path: Path, loader: str) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    policy = PolicyConfig(model=str(tiny_model), lora_rank=4, dtype="fp32")
    checkpoint, expected = trained(policy, tmp_path)
    out = export_policy(policy, checkpoint, tmp_path / "out", "adapter")
    assert not list(out.glob("model*"))
    if loader == "transformers":
        model = AutoModelForCausalLM.from_pretrained(out)
    else:
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(policy.model), str(out))
    torch.testing.assert_close(logprobs_of(model), expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_looked_up_on_a_network(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the base model is called by a name, which a model hub might know."""
    import socket

    from learner.policy import save_adapter

    asked: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> Any:
        asked.append(arguments)
        raise OSError("no network in this test")

    module = load_policy(PolicyConfig(model=str(tiny_model), lora_rank=4, dtype="fp32"))
    module.model.peft_config["default"].base_model_name_or_path = "some/model"
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    save_adapter(module.model, tmp_path / "adapter", base_name="some/model")
    assert not asked


def test_bf16_is_merged_in_fp32_and_cast_once(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = PolicyConfig(model=str(tiny_model), lora_rank=4, dtype="fp32")
    checkpoint, _ = trained(policy, tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(export_policy(policy, checkpoint, tmp_path / "fp32", "merged"))
    cast = AutoModelForCausalLM.from_pretrained(
        export_policy(policy, checkpoint, tmp_path / "bf16", "merged", dtype="bf16")
    )
    for (name, one), (_, other) in zip(whole.named_parameters(), cast.named_parameters(), strict=True):
        assert other.dtype == torch.bfloat16
        assert torch.equal(one.to(torch.bfloat16), other), name


def test_an_exported_adapter_starts_the_next_stage_where_the_former_ended(tiny_model: Path, tmp_path: Path) -> None:
    policy = PolicyConfig(model=str(tiny_model), lora_rank=4, dtype="fp32")
    checkpoint, expected = trained(policy, tmp_path)
    out = export_policy(policy, checkpoint, tmp_path / "out", "adapter")
    again = load_policy(policy.model_copy(update={"adapter": str(out)}))
    with torch.no_grad():
        logprobs, _ = again(pad([TokenSequence(IDS[:3], IDS[3:])]))
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)


def test_without_a_checkpoint_the_policy_is_exported_as_it_began(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = PolicyConfig(model=str(tiny_model), lora_rank=4, dtype="fp32")
    out = export_policy(policy, None, tmp_path / "out", "merged")
    torch.testing.assert_close(logprobs_of(AutoModelForCausalLM.from_pretrained(out)), begun(policy))


def test_what_cannot_be_exported_is_one_sentence_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    policy = PolicyConfig(model=str(tiny_model), lora_rank=4, dtype="fp32")
    checkpoint, _ = trained(policy, tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(UsageError, match="is there already"):
        export_policy(policy, checkpoint, tmp_path / "taken", "merged")
    with pytest.raises(UsageError, match="merged model alone"):
        export_policy(policy.model_copy(update={"lora_rank": 0}), checkpoint, tmp_path / "out", "adapter")
    with pytest.raises(CheckpointError, match="holds another policy"):
        export_policy(policy.model_copy(update={"lora_rank": 0}), checkpoint, tmp_path / "out", "merged")
    with pytest.raises(CheckpointError, match="weights of other shapes"):
        export_policy(policy.model_copy(update={"lora_rank": 8}), checkpoint, tmp_path / "out", "merged")
    next((checkpoint / "shards").glob("mp_rank*")).write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        export_policy(policy, checkpoint, tmp_path / "out", "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "taken"]
