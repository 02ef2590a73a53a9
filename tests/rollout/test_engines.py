"""Real engines on a tiny model: transformers always, vLLM where it is installed."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.config import RolloutConfig, SamplingConfig
from rollout.engines import Completion, Engine, GenerationRequest, SafetensorsFiles, WeightsError, create_engine
from rollout.engines.base import DeviceTransfer
from rollout.engines.create import pick_device, pick_dtype
from rollout.tokenizer import ChatTokenizer, stop_token_ids
from tasks.errors import UsageError
from tasks.records import PolicyVersion, Prompt

END = 257
PROMPTS = (tuple(range(40, 60)), tuple(range(60, 110)))


@pytest.fixture(scope="module")
def transformers_engine(tiny_model: Path, tiny_config: RolloutConfig) -> Iterator[Engine]:
    engine = create_engine(tiny_config, model=tiny_model)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.heavy)])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"{request.param}_engine")


def _draw(engine: Engine, prompts: list[Prompt], samples: int) -> list[Completion]:
    async def run() -> list[Completion]:
        requests = [GenerationRequest(prompt, tuple(range(samples))) for prompt in prompts]
        return [one async for one in engine.generate(requests)]

    return sorted(asyncio.run(run()), key=lambda one: (one.prompt_id, one.index))


def _update(engine: Engine, path: Path, version: PolicyVersion) -> None:
    async def run() -> None:
        await engine.begin_update()
        await engine.load_weights(SafetensorsFiles((path,)))
        await engine.finish_update(version)

    asyncio.run(run())


def _true_logprobs(model: Path, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float) -> list[float]:
    """Log-probabilities of `tokens` by one plain forward pass over prompt and completion."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    ids = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logits = reference(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def test_logprobs_are_those_of_a_plain_forward_pass(
    engine: Engine, tiny_model: Path, tiny_config: RolloutConfig, prompt_of: Callable[..., Prompt]
) -> None:
    """Two prompts of 20 and 50 tokens in one batch, so that padding, spreading and compaction are all at work."""
    prompts = [prompt_of(ids, f"p{i}") for i, ids in enumerate(PROMPTS)]
    completions = _draw(engine, prompts, samples=5)
    assert len(completions) == 10
    for one in completions:
        assert len(one.token_ids) == len(one.logprobs)
        ids = PROMPTS[int(one.prompt_id[1:])]
        expected = _true_logprobs(tiny_model, ids, one.token_ids, tiny_config.sampling.temperature)
        assert list(one.logprobs) == pytest.approx(expected, abs=1e-3)
    assert len({one.token_ids for one in completions}) == 10, "samples must differ"


def test_completions_end_at_the_end_token_or_the_limit(
    engine: Engine, tiny_config: RolloutConfig, prompt_of: Callable[..., Prompt]
) -> None:
    """258 near-uniform tokens over 32 steps: about one completion in nine stops, and 96 of them hold both kinds."""
    limit = tiny_config.sampling.max_tokens
    completions = _draw(engine, [prompt_of(PROMPTS[0], f"q{i}") for i in range(6)], samples=16)
    assert {one.finish_reason for one in completions} == {"stop", "length"}
    for one in completions:
        assert END not in one.token_ids[:-1]
        assert (one.token_ids[-1] == END) == (one.finish_reason == "stop")
        assert len(one.token_ids) == limit or one.finish_reason == "stop"
        assert "<|end|>" not in one.text


def test_samples_depend_on_their_seed_alone(engine: Engine, prompt_of: Callable[..., Prompt]) -> None:
    """The same sample drawn alone and among others is the same: batches do not matter."""
    prompt = prompt_of(PROMPTS[1], "same")
    alone = _draw(engine, [prompt], samples=1)[0]
    among = _draw(engine, [prompt, prompt_of(PROMPTS[0], "other")], samples=4)
    assert next(one for one in among if (one.prompt_id, one.index) == ("same", 0)).token_ids == alone.token_ids


def test_a_weight_update_changes_the_first_token_and_restores_it(
    engine: Engine, tiny_model: Path, changed_weights: Path, prompt_of: Callable[..., Prompt]
) -> None:
    """The same seed draws by the same noise, so equal weights give equal tokens and log-probabilities."""
    prompt = prompt_of(PROMPTS[1], "update")
    before = _draw(engine, [prompt], samples=2)
    _update(engine, changed_weights, PolicyVersion(step=1))
    changed = _draw(engine, [prompt], samples=2)
    assert changed[0].policy_versions == (PolicyVersion(step=1),)
    assert abs(changed[0].logprobs[0] - before[0].logprobs[0]) > 0.01
    _update(engine, tiny_model / "model.safetensors", PolicyVersion())
    after = _draw(engine, [prompt], samples=2)
    assert [one.token_ids for one in after] == [one.token_ids for one in before]
    assert list(after[0].logprobs) == pytest.approx(list(before[0].logprobs), abs=1e-4)


def test_cancelled_samples_leave_the_engine(engine: Engine, prompt_of: Callable[..., Prompt]) -> None:
    async def run() -> None:
        stream = engine.generate([GenerationRequest(prompt_of(PROMPTS[0], "gone"), tuple(range(40)))])
        await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    assert len(_draw(engine, [prompt_of(PROMPTS[0], "next")], samples=2)) == 2


def test_weights_by_device_memory_need_another_setting(engine: Engine) -> None:
    async def run() -> None:
        await engine.begin_update()
        try:
            with pytest.raises(UsageError, match="weight"):
                await engine.load_weights(DeviceTransfer({}))
        finally:
            await engine.finish_update(PolicyVersion())

    asyncio.run(run())


def test_incomplete_or_foreign_weights_are_refused(
    transformers_engine: Engine, tiny_model: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(str(tiny_model / "model.safetensors"))
    norm = state.pop("model.norm.weight")
    save_file(state, str(tmp_path / "partial.safetensors"))
    save_file({"model.norm.weight": norm, "else.weight": torch.ones(1)}, str(tmp_path / "foreign.safetensors"))
    save_file({"model.norm.weight": torch.ones(3)}, str(tmp_path / "shape.safetensors"))
    for name, says in (("partial", "lack 1 tensors"), ("foreign", "no such tensor"), ("shape", r"shape \(3,\)"),
                       ("absent", "cannot be read")):  # fmt: skip
        with pytest.raises(WeightsError, match=says):
            _update(transformers_engine, tmp_path / f"{name}.safetensors", PolicyVersion(step=9))
    _update(transformers_engine, tiny_model / "model.safetensors", PolicyVersion())


def test_vllm_gives_way_to_transformers_with_one_sentence(
    tiny_model: Path, tiny_config: RolloutConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.WARNING):
        engine = create_engine(tiny_config.model_copy(update={"engine": "vllm"}), model=tiny_model)
    assert engine.name == "transformers"
    (record,) = [one for one in caplog.records if one.name == "rollout.engines.create"]
    assert "transformers engine takes its place" in record.getMessage()
    asyncio.run(engine.close())


def test_a_failed_probe_gives_way_too(
    tiny_model: Path, tiny_config: RolloutConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def admit(self, request: Any) -> None:
            raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("rollout.engines.vllm.VllmStepper", Broken)
    engine = create_engine(tiny_config.model_copy(update={"engine": "vllm"}), model=tiny_model)
    assert engine.name == "transformers"
    assert "torchvision::nms" in caplog.text
    asyncio.run(engine.close())


def test_missing_cuda_and_end_token_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match=r"rollout\.device = cuda"):
        pick_device(RolloutConfig(device="cuda"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="eos_token_id"):
        stop_token_ids(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert stop_token_ids(tmp_path) == (2, 0)


def test_dtype_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RolloutConfig(sampling=SamplingConfig())
    for flags, dtype in (("avx512f", "fp32"), ("avx512f avx512_bf16", "bf16"), ("amx_bf16", "bf16")):
        monkeypatch.setattr("pathlib.Path.read_text", lambda self, flags=flags: flags)
        assert pick_dtype(config, "cpu") == dtype
    assert pick_dtype(config, "cuda") == "bf16"
    assert pick_dtype(RolloutConfig(dtype="fp32"), "cuda") == "fp32"


def test_answers_end_with_the_token_at_which_engines_stop(tiny_model: Path, tmp_path: Path) -> None:
    """A tokenizer may call another token its end; what a policy is taught to write must be what stops the engine."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["eos_token"] = settings.get("bos_token") or "<s>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatTokenizer.load(folder).end_token_id == stop_token_ids(folder)[0]
