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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from learner.batch import TokenBatch, TokenSequence, pack, pad, split_padded, split_shared
from learner.checkpoint import CheckpointFolder, LearnerState
from learner.config import SftConfig
from learner.sft_data import SftPair, data_hash
from tasks.errors import UsageError
from tasks.records import PolicyVersion
from tasks.records.base import Record

if TYPE_CHECKING:
    from learner.engine import PolicyTrainer, StepReport

logger = logging.getLogger(__name__)

PROGRESS = "progress.json"
"""File of a checkpoint that says how far the stage was."""


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


class SftProgress(Record):
    """How far a run of stage 1 is; kept in its checkpoints."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_loss: float = 0.0
    last_loss: float = 0.0
    held_out_loss: float | None = None
    held_out_at: int = 0
    """Steps that were done when the held-out loss was measured."""

    def after(self, loss: float, tokens: int, held_out: float | None, seconds: float) -> SftProgress:
        """The progress after one more step."""
        step = self.step + 1
        measured = {"held_out_loss": held_out, "held_out_at": step} if held_out is not None else {}
        return self.model_copy(
            update={
                "step": step, "tokens": self.tokens + tokens, "seconds": seconds, "last_loss": loss,
                "first_loss": self.first_loss if self.step else loss, **measured,
            }
        )  # fmt: skip


class SftCheckpoints:
    """Checkpoints of stage 1; every rank has one over the same folder and calls it together with the others."""

    def __init__(self, folder: CheckpointFolder, run_id: str) -> None:
        self._folder = folder
        self._run_id = run_id

    def restore(self, trainer: PolicyTrainer) -> SftProgress:
        """Loads the latest into the trainer; the beginning where there is none. Raises CheckpointError."""
        found = None
        for rank in range(trainer.world):  # one at a time: looking for the latest removes half-written ones
            if rank == trainer.rank:
                found = self._folder.latest()
            trainer.total_over_ranks(0.0)
        if found is None:
            return SftProgress()
        trainer.load(found.folder)
        logger.info("resumed from %s at step %d", found.folder, found.state.version.step)
        return SftProgress.from_json((found.folder / PROGRESS).read_text())

    def save(self, trainer: PolicyTrainer, progress: SftProgress) -> None:
        """Writes a checkpoint."""
        version = PolicyVersion(step=progress.step)
        if trainer.rank == 0:
            (self._folder.begin(version) / PROGRESS).write_text(progress.to_json() + "\n")
        trainer.total_over_ranks(0.0)
        trainer.save(self._folder.partial(version))
        trainer.total_over_ranks(0.0)
        if trainer.rank == 0:
            self._folder.complete(LearnerState(run_id=self._run_id, version=version, starts={0: 0}, fates={}))


def train(
    trainer: PolicyTrainer,
    pairs: Sequence[SftPair],
    held_out: Sequence[SftPair],
    config: SftConfig,
    out_dir: Path,
    *,
    row_tokens: int,
    checkpoints: SftCheckpoints | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SftReport:
    """Trains on the pairs until `steps` or `minutes` are over; every rank calls it with the same pairs.

    With `checkpoints` it goes on from the latest, as if it had never been stopped. Writes `out_dir/sft.jsonl`.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    kept = [pair for pair in pairs if len(pair.sequence) <= config.max_tokens]
    held = [pair.sequence for pair in held_out if len(pair.sequence) <= config.max_tokens]
    if not kept:
        raise UsageError(
            f"none of {len(pairs)} pairs has at most learner.sft.max_tokens = {config.max_tokens} tokens: raise it, or "
            "give other data"
        )
    at = checkpoints.restore(trainer) if checkpoints is not None else SftProgress()
    log = _Log(out_dir / "sft.jsonl" if trainer.rank == 0 else None, at.step, config.progress_s, clock)
    order = _Order(len(kept), config.data.seed, skip=at.step * config.batch)
    began, saved = clock() - at.seconds, at.step
    while at.step < config.steps:
        share = _share(trainer, config, at.step, clock() - began)
        if share >= 1.0:
            break
        chosen = [kept[i].sequence for i in order.take(config.batch)]
        loss, step_tokens, report = _step(trainer, chosen, row_tokens, share, config)
        held_loss = None
        if held and (at.step + 1) % config.held_out_every == 0:
            held_loss = held_out_loss(trainer, held, row_tokens, config)
        at = at.after(loss, step_tokens, held_loss, clock() - began)
        log.write(
            step=at.step - 1, loss=loss, held_out_loss=held_loss, gradient_norm=report.gradient_norm,
            learning_rate=report.learning_rate, seconds=at.seconds, tokens_per_s=at.tokens / max(at.seconds, 1e-9),
        )  # fmt: skip
        if checkpoints is not None and at.step % config.checkpoint_every == 0:
            checkpoints.save(trainer, at)
            saved = at.step
    if checkpoints is not None and saved != at.step:
        checkpoints.save(trainer, at)
    if held and at.held_out_at != at.step:
        final = held_out_loss(trainer, held, row_tokens, config)
        at = at.model_copy(update={"held_out_loss": final, "held_out_at": at.step})
    return SftReport(
        steps=at.step, pairs=len(kept), left_out=len(pairs) - len(kept), data_hash=data_hash(kept),
        first_loss=at.first_loss, last_loss=at.last_loss, held_out_loss=at.held_out_loss,
        held_out_perplexity=None if at.held_out_loss is None else math.exp(at.held_out_loss),
        tokens_per_s=at.tokens / max(at.seconds, 1e-9), seconds=at.seconds,
    )  # fmt: skip


def held_out_loss(
    trainer: PolicyTrainer, sequences: Sequence[TokenSequence], row_tokens: int, config: SftConfig
) -> float:
    """Mean negative log-likelihood per completion token, over all ranks' shares of the sequences."""
    own = sequences[trainer.rank :: trainer.world]
    total = sum(
        -float(part.double().sum()) for part in trainer.logprobs(layout(own, row_tokens, trainer.device, config.layout))
    )
    loss, count = trainer.total_over_ranks(total, float(sum(len(s.completion_ids) for s in own)))
    return loss / count


def layout(
    sequences: Sequence[TokenSequence], row_tokens: int, device: str, kind: Literal["auto", "pack", "pad"] = "auto"
) -> list[TokenBatch]:
    """Micro-batches: packed without padding, or padded rows of like length; auto packs on CPU and pads on a GPU."""
    if not sequences:
        return []
    if kind == "pack" or (kind == "auto" and device == "cpu"):
        return [pack([sequences[i] for i in row]) for row in split_shared(sequences, row_tokens)]
    rows = split_padded([len(s) for s in sequences], row_tokens)
    return [pad([sequences[i] for i in row]) for row in rows]


def _step(
    trainer: PolicyTrainer, chosen: Sequence[TokenSequence], row_tokens: int, share: float, config: SftConfig
) -> tuple[float, int, StepReport]:
    own = chosen[trainer.rank :: trainer.world]
    (count,) = trainer.total_over_ranks(float(sum(len(s.completion_ids) for s in own)))
    batches = layout(own, row_tokens, trainer.device, config.layout)
    report = trainer.step(batches, lambda logprobs, _entropy, _number: -logprobs.sum() / count, progress=share)
    (loss,) = trainer.total_over_ranks(report.loss)
    (tokens,) = trainer.total_over_ranks(float(report.tokens))
    return loss, int(tokens), report


def _share(trainer: PolicyTrainer, config: SftConfig, step: int, seconds: float) -> float:
    """Share of the run that is over, by whichever limit is nearer; the first rank's clock counts for all."""
    (seconds,) = trainer.total_over_ranks(seconds if trainer.rank == 0 else 0.0)
    by_time = seconds / (60.0 * config.minutes) if config.minutes else 0.0
    return max(by_time, step / config.steps)


class _Order:
    """Endless shuffled passes over `count` items, from the item number `skip` on."""

    def __init__(self, count: int, seed: int, skip: int = 0) -> None:
        self._rng = random.Random(seed)
        self._count = count
        self._left: list[int] = []
        self.take(skip)

    def take(self, size: int) -> list[int]:
        while len(self._left) < size:
            self._left.extend(self._rng.sample(range(self._count), self._count))
        taken, self._left = self._left[:size], self._left[size:]
        return taken


class _Log:
    """The loss curve as JSON lines, each step once, and a progress line now and then."""

    def __init__(self, path: Path | None, step: int, progress_s: float, clock: Callable[[], float]) -> None:
        """Steps from `step` on, which a run that was killed may have written already, are cut."""
        self._path, self._progress_s, self._clock = path, progress_s, clock
        self._last = -math.inf
        if path is not None and path.is_file():
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            partial = path.with_suffix(".partial")
            partial.write_text("".join(lines[:step]))
            partial.replace(path)

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
