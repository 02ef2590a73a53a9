"""transformers as a stepper: what runs where vLLM is not installed.

A batch of samples is decoded together. Its distinct prompts are computed once, left-padded, and their cache is spread
over their samples; finished rows leave the batch when a quarter of it is done. New samples wait for the next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config import RolloutConfig
from rollout.engines.base import SafetensorsFiles, WeightsError, WeightSource
from rollout.engines.stepped import StepOutput, StepRequest
from tasks.errors import UsageError

if TYPE_CHECKING:
    import torch

COMPACT_AT = 0.25
"""Share of finished rows at which the batch is made smaller: copying the cache costs about as much as a step."""


@dataclass
class _Batch:
    """Rows that are decoded together; `mask_rt` covers prompt and completion, 0 where the row is padded."""

    requests: list[StepRequest]
    generators: list[torch.Generator]
    cache: Any
    mask_rt: torch.Tensor
    last_r: torch.Tensor
    """Newest token of each row, not yet in the cache."""
    drawn_r: list[int]
    done_r: list[bool]


class TransformersStepper:
    """A causal language model of transformers on one device."""

    name = "transformers"

    def __init__(self, model: Path, config: RolloutConfig, *, device: str, dtype: str, stop_ids: Sequence[int]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if device == "cpu":
            torch.set_num_threads(config.cpu_threads)
        self._torch = torch
        kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        self._model = AutoModelForCausalLM.from_pretrained(str(model), dtype=kind).to(device).eval()
        self._device = device
        self._temperature = config.sampling.temperature
        self._max_tokens = config.sampling.max_tokens
        self._stop_ids = frozenset(stop_ids)
        self._waiting: deque[StepRequest] = deque()
        self._batch: _Batch | None = None
        self.max_rows = config.vllm.max_sequences

    def admit(self, request: StepRequest) -> None:
        self._waiting.append(request)

    def step(self) -> list[StepOutput]:
        with self._torch.inference_mode():
            if self._batch is None:
                if not self._waiting:
                    return []
                self._batch, logits = self._prefill([self._waiting.popleft() for _ in range(len(self._waiting))])
            else:
                logits = self._decode(self._batch)
            return self._draw(self._batch, logits)

    def abort(self, ids: Sequence[str]) -> None:
        gone = set(ids)
        self._waiting = deque(request for request in self._waiting if request.id not in gone)
        if self._batch:
            for row, request in enumerate(self._batch.requests):
                self._batch.done_r[row] |= request.id in gone
            self._compact()

    def begin_update(self) -> None:
        pass

    def load_weights(self, source: WeightSource) -> None:
        if not isinstance(source, SafetensorsFiles):
            raise UsageError(
                "the transformers engine takes weights from files only: set the learner's publish adapter."
            )
        from safetensors import safe_open

        own = self._model.state_dict(keep_vars=True)
        missing = {name for name, _ in self._model.named_parameters()}
        for path in source.paths:
            try:
                with safe_open(str(path), framework="pt") as file, self._torch.no_grad():
                    for name in file.keys():  # noqa: SIM118  not a mapping
                        _replace(own.get(name), name, file.get_tensor(name))
                        missing.discard(name)
            except OSError as error:
                raise WeightsError(f"{path} cannot be read: {error}") from error
        if missing:
            raise WeightsError(f"the weights lack {len(missing)} tensors of the model, first {min(missing)}")

    def finish_update(self) -> None:
        pass

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self._batch = None
        self._waiting.clear()

    def _prefill(self, requests: list[StepRequest]) -> tuple[_Batch, torch.Tensor]:
        torch = self._torch
        prompts = list(dict.fromkeys(request.prompt_token_ids for request in requests))
        longest = max(map(len, prompts))
        ids_pt = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask_pt = torch.zeros_like(ids_pt)
        for row, prompt in enumerate(prompts):
            ids_pt[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask_pt[row, longest - len(prompt) :] = 1
        ids_pt, mask_pt = ids_pt.to(self._device), mask_pt.to(self._device)
        output = self._model(
            input_ids=ids_pt, attention_mask=mask_pt, position_ids=_positions(mask_pt), use_cache=True, logits_to_keep=1
        )
        place = {prompt: row for row, prompt in enumerate(prompts)}
        rows = torch.tensor([place[request.prompt_token_ids] for request in requests], device=self._device)
        output.past_key_values.batch_select_indices(rows)
        batch = _Batch(
            requests=requests,
            generators=[torch.Generator().manual_seed(request.seed) for request in requests],
            cache=output.past_key_values,
            mask_rt=mask_pt[rows],
            last_r=rows,
            drawn_r=[0] * len(requests),
            done_r=[False] * len(requests),
        )
        return batch, output.logits[rows, -1]

    def _decode(self, batch: _Batch) -> torch.Tensor:
        batch.mask_rt = self._torch.cat([batch.mask_rt, batch.mask_rt.new_ones((len(batch.requests), 1))], dim=1)
        output = self._model(
            input_ids=batch.last_r[:, None],
            attention_mask=batch.mask_rt,
            position_ids=batch.mask_rt.sum(dim=1, keepdim=True) - 1,
            past_key_values=batch.cache,
            use_cache=True,
        )
        batch.cache = output.past_key_values
        return output.logits[:, -1]

    def _draw(self, batch: _Batch, logits_rv: torch.Tensor) -> list[StepOutput]:
        """Draws each row's next token by the Gumbel trick, with the row's own generator."""
        torch = self._torch
        logprobs_rv = torch.log_softmax(logits_rv.float() / self._temperature, dim=-1).cpu()
        noise_rv = torch.stack([torch.empty(logprobs_rv.shape[1]).exponential_(generator=g) for g in batch.generators])
        tokens_r = (logprobs_rv - noise_rv.log()).argmax(dim=-1)
        chosen_r = logprobs_rv.gather(1, tokens_r[:, None])[:, 0]
        batch.last_r = tokens_r.to(self._device)
        outputs = []
        for row, (request, token, logprob) in enumerate(
            zip(batch.requests, tokens_r.tolist(), chosen_r.tolist(), strict=True)
        ):
            if batch.done_r[row]:
                continue
            batch.drawn_r[row] += 1
            stopped, full = token in self._stop_ids, batch.drawn_r[row] >= self._max_tokens
            batch.done_r[row] = stopped or full
            outputs.append(
                StepOutput(request.id, (token,), (logprob,), "stop" if stopped else "length" if full else None)
            )
        self._compact()
        return outputs

    def _compact(self) -> None:
        batch = self._batch
        if batch is None or sum(batch.done_r) < COMPACT_AT * len(batch.done_r):
            return
        left = [row for row, done in enumerate(batch.done_r) if not done]
        if not left:
            self._batch = None
            return
        rows = self._torch.tensor(left, device=self._device)
        batch.cache.batch_select_indices(rows)
        batch.mask_rt, batch.last_r = batch.mask_rt[rows], batch.last_r[rows]
        batch.requests = [batch.requests[row] for row in left]
        batch.generators = [batch.generators[row] for row in left]
        batch.drawn_r = [batch.drawn_r[row] for row in left]
        batch.done_r = [False] * len(left)


def _positions(mask_rt: torch.Tensor) -> torch.Tensor:
    return (mask_rt.cumsum(dim=1) - 1).clamp(min=0)


def _replace(own: torch.Tensor | None, name: str, value: torch.Tensor) -> None:
    if own is None or own.shape != value.shape:
        have = "no such tensor" if own is None else f"shape {tuple(own.shape)}"
        raise WeightsError(f"tensor {name} of shape {tuple(value.shape)} does not fit: the model has {have}")
    own.copy_(value)
