"""Records for the learner's tests: scored samples and groups with chosen outcomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.records import Candidate, Evaluation, Measurement, PolicyVersion, Prompt, Sample, ScoredGroup, ScoredSample

TASK_HASH = "a" * 64


class Records:
    """Builds records; every sample belongs to prompt `p0` unless said otherwise."""

    def evaluation(
        self, speedup: float | None = None, *, reason: str | None = None, labels: tuple[str, ...] = (),
        ci_low: float | None = None, protocol: str = "reward",
    ) -> Evaluation:  # fmt: skip
        """Accepted with a speedup (the candidate takes 1 ms), or rejected or unscored with a reason."""
        measurement = None
        if speedup is not None:
            measurement = Measurement(
                speedup=speedup, ci_low=ci_low or speedup, ci_high=speedup, reference_ms=speedup, candidate_ms=1.0,
                pairs=20, protocol=protocol,
            )  # fmt: skip
        unscored = reason in ("device_fault", "evaluator_lost")
        return Evaluation(
            outcome="accepted" if measurement else "unscored" if unscored else "rejected",
            reason=reason, step="time", labels=labels, task_id="t", task_hash=TASK_HASH, candidate_hash="c" * 64,
            measurement=measurement,
        )  # fmt: skip

    def scored(
        self, index: int, judged: Evaluation | None, *, prompt_id: str = "p0", step: int = 0, epoch: int = 0,
        copy_of: str = "", token_ids: tuple[int, ...] = (5, 6, 7), logprobs: tuple[float, ...] | None = None,
        finish_reason: str = "stop", readable: bool = True, **more: Any,
    ) -> ScoredSample:  # fmt: skip
        """A sample with its evaluation, drawn under one policy version."""
        sample = Sample(
            id=f"{prompt_id}/{index}", prompt_id=prompt_id, index=index, text="", token_ids=token_ids,
            logprobs=(-1.0,) * len(token_ids) if logprobs is None else logprobs,
            policy_versions=(PolicyVersion(epoch=epoch, step=step),), finish_reason=finish_reason,
            candidate=Candidate(source=f"x = {index}") if readable else None, **more,
        )  # fmt: skip
        return ScoredSample(sample=sample, evaluation=judged, copy_of=copy_of)

    def group(
        self, samples: list[ScoredSample], *, group_id: str = "p0", prompt_ids: tuple[int, ...] = (1, 2, 3),
        turns: int = 1,
    ) -> ScoredGroup:  # fmt: skip
        """A scored group of these samples."""
        prompt = Prompt(
            id=group_id, run_id="r", task_id="t", task_hash=TASK_HASH, device_type="cpu", text="",
            token_ids=prompt_ids, turns=turns,
        )  # fmt: skip
        return ScoredGroup(id=group_id, run_id="r", prompt=prompt, samples=tuple(samples))


@pytest.fixture(scope="session")
def records() -> Records:
    """The builder."""
    return Records()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama (fp32, grouped queries, tied embeddings) without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(str(folder))
    return folder


@pytest.fixture
def free_port() -> int:
    """A TCP port that nobody uses now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
