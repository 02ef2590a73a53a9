"""Stage 1: supervised fine-tuning on prompts and verified kernels, loss on completions only.

Invariants: each step's loss is the mean over the step's completion tokens, however they are laid out or split over
ranks; the order of pairs follows from the seed; progress is written as JSON lines that can be read while it runs.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner.batch import TokenBatch, TokenSequence, pack, pad, split_padded, split_shared
from learner.config import LearnerConfig, SftConfig
from learner.sft_data import SftPair, build_pairs, data_hash, default_source

if TYPE_CHECKING:
    from learner.engine import PolicyTrainer, StepReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftReport:
    """What a run of stage 1 came to; losses in nats per completion token."""

    steps: int
    pairs: int
    left_out: int
    data_hash: str
    first_loss: float
    last_loss: float
    held_out_loss: float | None
    held_out_perplexity: float | None
    tokens_per_s: float
    seconds: float


def run_sft(config: LearnerConfig, out_dir: Path) -> SftReport:
    """Builds the data, trains, writes `out_dir`: `sft.jsonl` (loss curve), `adapter/` or `model/`, `report.json`."""
    from learner.device import resolve_device
    from learner.engine import PolicyTrainer
    from learner.policy import load_policy, save_policy
    from rollout.tokenizer import ChatTokenizer

    device = resolve_device(config.device)
    tokenizer = ChatTokenizer.load(Path(config.policy.model))
    source = default_source(
        tokenizer, config.sft.data, max_prompt_tokens=config.sft.max_prompt_tokens,
        max_completion_tokens=config.sft.max_completion_tokens,
    )  # fmt: skip
    pairs = list(build_pairs(source, config.sft.data))
    held_out = list(build_pairs(source, config.sft.data, held_out=True))
    policy = load_policy(config.policy, device, seed=config.sft.data.seed)
    trainer = PolicyTrainer(policy, config.sft.optimizer, config.deepspeed, device=device)
    report = train(trainer, pairs, held_out, config.sft, out_dir, row_tokens=config.deepspeed.row_tokens)
    if trainer.rank == 0:
        save_policy(trainer.policy.model, out_dir, base_name=Path(config.policy.model).name)
        (out_dir / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def train(
    trainer: PolicyTrainer,
    pairs: Sequence[SftPair],
    held_out: Sequence[SftPair],
    config: SftConfig,
    out_dir: Path,
    *,
    row_tokens: int,
    clock: Callable[[], float] = time.monotonic,
) -> SftReport:
    """Trains on the pairs until `steps` or `minutes` are over; every rank calls it with the same pairs."""
    out_dir.mkdir(parents=True, exist_ok=True)
    kept = [pair for pair in pairs if len(pair.sequence) <= config.max_tokens]
    held = [pair.sequence for pair in held_out if len(pair.sequence) <= config.max_tokens]
    log = _Log(out_dir / "sft.jsonl" if trainer.rank == 0 else None, config.progress_s, clock)
    began, tokens, losses, held_loss = clock(), 0, [], None
    held_at = -1
    order = _Order(len(kept), config.data.seed)
    for step in range(config.steps):
        share = _share(trainer, config, step, clock() - began)
        if share >= 1.0:
            break
        chosen = [kept[i].sequence for i in order.take(config.batch)]
        loss, step_tokens, report = _step(trainer, chosen, row_tokens, share)
        losses.append(loss)
        tokens += step_tokens
        if held and (step + 1) % config.held_out_every == 0:
            held_loss, held_at = held_out_loss(trainer, held, row_tokens), step
        log.write(
            step=step, loss=loss, held_out_loss=held_loss if held_at == step else None,
            gradient_norm=report.gradient_norm, learning_rate=report.learning_rate, seconds=clock() - began,
            tokens_per_s=tokens / max(clock() - began, 1e-9),
        )  # fmt: skip
    if held and held_at != len(losses) - 1:
        held_loss = held_out_loss(trainer, held, row_tokens)
    seconds = clock() - began
    return SftReport(
        steps=len(losses), pairs=len(kept), left_out=len(pairs) - len(kept), data_hash=data_hash(kept),
        first_loss=losses[0] if losses else math.nan, last_loss=losses[-1] if losses else math.nan,
        held_out_loss=held_loss, held_out_perplexity=None if held_loss is None else math.exp(held_loss),
        tokens_per_s=tokens / max(seconds, 1e-9), seconds=seconds,
    )  # fmt: skip


def held_out_loss(trainer: PolicyTrainer, sequences: Sequence[TokenSequence], row_tokens: int) -> float:
    """Mean negative log-likelihood per completion token, over all ranks' shares of the sequences."""
    own = sequences[trainer.rank :: trainer.world]
    total = sum(-float(part.double().sum()) for part in trainer.logprobs(layout(own, row_tokens, trainer.device)))
    loss, count = trainer.total_over_ranks(total, float(sum(len(s.completion_ids) for s in own)))
    return loss / count


def layout(sequences: Sequence[TokenSequence], row_tokens: int, device: str) -> list[TokenBatch]:
    """Micro-batches: packed without padding on CPU, padded rows of like length on a GPU."""
    if not sequences:
        return []
    if device == "cpu":
        return [pack([sequences[i] for i in row]) for row in split_shared(sequences, row_tokens)]
    rows = split_padded([len(s) for s in sequences], row_tokens)
    return [pad([sequences[i] for i in row]) for row in rows]


def _step(
    trainer: PolicyTrainer, chosen: Sequence[TokenSequence], row_tokens: int, share: float
) -> tuple[float, int, StepReport]:
    own = chosen[trainer.rank :: trainer.world]
    (count,) = trainer.total_over_ranks(float(sum(len(s.completion_ids) for s in own)))
    report = trainer.step(
        layout(own, row_tokens, trainer.device), lambda logprobs, _entropy, _number: -logprobs.sum() / count,
        progress=share,
    )  # fmt: skip
    (loss,) = trainer.total_over_ranks(report.loss)
    (tokens,) = trainer.total_over_ranks(float(report.tokens))
    return loss, int(tokens), report


def _share(trainer: PolicyTrainer, config: SftConfig, step: int, seconds: float) -> float:
    """Share of the run that is over, by whichever limit is nearer; the first rank's clock counts for all."""
    (seconds,) = trainer.total_over_ranks(seconds if trainer.rank == 0 else 0.0)
    by_time = seconds / (60.0 * config.minutes) if config.minutes else 0.0
    return max(by_time, step / config.steps)


class _Order:
    """Endless shuffled passes over `count` items."""

    def __init__(self, count: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._count = count
        self._left: list[int] = []

    def take(self, size: int) -> list[int]:
        while len(self._left) < size:
            self._left.extend(self._rng.sample(range(self._count), self._count))
        taken, self._left = self._left[:size], self._left[size:]
        return taken


class _Log:
    """The loss curve as JSON lines, and a progress line now and then."""

    def __init__(self, path: Path | None, progress_s: float, clock: Callable[[], float]) -> None:
        self._path, self._progress_s, self._clock = path, progress_s, clock
        self._last = -math.inf

    def write(self, **values: Any) -> None:
        if self._path is None:
            return
        with self._path.open("a") as file:
            file.write(json.dumps(values, sort_keys=True) + "\n")
        if self._clock() - self._last >= self._progress_s:
            self._last = self._clock()
            logger.info(
                "sft step %d loss %.4f, %.0f tokens/s, %.0f s", values["step"], values["loss"],
                values["tokens_per_s"], values["seconds"],
            )  # fmt: skip
