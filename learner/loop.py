"""The learner: scored groups in, optimizer steps and checkpoints out. No Ray here; `actor.py` wraps it.

Invariants:
- Exactly once in the surviving lineage: a group stays pending in the stream until a checkpoint that contains its fate
  is complete; then all such groups are acked in one batch. After a crash the checkpoint's groups are acked without
  training and the rest is judged anew.
- Each start is a new epoch, given by the stream's fencing token, so that versions of a lost lineage are told apart.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from learner import metrics
from learner.checkpoint import CheckpointFolder, LearnerState
from learner.config import LearnerConfig
from learner.groups import Fate, Fates, JudgedGroup, Lineage, judge_group
from learner.moments import RewardMoments
from tasks.records import PolicyVersion, ScoredGroup, ScoredSample

if TYPE_CHECKING:
    from learner.sampled import TrainItem

logger = logging.getLogger(__name__)

CONSUMER = "learner"
READ_AT_ONCE = 64


class GroupStream(Protocol):
    """The run's stream of scored groups; see `exemplar_store.RunStream`."""

    run_id: str

    def fence(self, role: str) -> int:
        """Takes the role over; the token grows with each call."""

    def claim_all(self, token: int) -> list[tuple[str, ScoredGroup]]:
        """Every pending group of earlier holders."""

    def relay(self) -> int:
        """Moves complete groups into the stream."""

    def read_scored(self, consumer: str, count: int, block_ms: int) -> list[tuple[str, ScoredGroup]]:
        """Groups nobody has read; they stay pending until acked."""

    def ack(self, entry_ids: Sequence[str]) -> int:
        """The groups leave the stream."""


class Trainer(Protocol):
    """What trains; see `TrainerOfOneRank` and `ranks.TrainerOfRanks`."""

    def step(self, items: Sequence[TrainItem]) -> dict[str, float]:
        """One optimizer step; returns its figures."""

    def save(self, folder: Path) -> None:
        """Writes weights, optimizer and randomness."""

    def load(self, folder: Path) -> None:
        """Reads them back."""


@dataclass(frozen=True)
class Standing:
    """Where the learner stands: its version, and every group that this lineage trained on or dropped."""

    epoch: int
    step: int
    fates: Mapping[str, Fate]

    @property
    def version(self) -> PolicyVersion:
        """The version as a record."""
        return PolicyVersion(epoch=self.epoch, step=self.step)


@dataclass(frozen=True)
class Learned:
    """What one call of `learn` did."""

    standing: Standing
    stepped: bool
    metrics: Mapping[str, float] = field(default_factory=dict)


class Learner:
    """One run's learner. `start` first; not to be shared between threads."""

    def __init__(
        self, config: LearnerConfig, trainer: Trainer, stream: GroupStream, checkpoints: CheckpointFolder
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._stream = stream
        self._checkpoints = checkpoints
        self._waiting: dict[str, tuple[str, ScoredGroup]] = {}
        self._to_ack: list[str] = []
        self._fates = Fates()
        self._moments = RewardMoments()
        self._lineage = Lineage(PolicyVersion(), {0: 0})
        self._saved: LearnerState | None = None

    def start(self) -> Standing:
        """Takes the role over, restores the latest checkpoint, acks what it contains and claims the rest."""
        token = self._stream.fence("learner")
        epoch = token - 1
        found = self._checkpoints.latest()
        step, starts = 0, {}
        if found is not None:
            self._trainer.load(found.folder)
            state = found.state
            step, starts = state.version.step, dict(state.starts)
            self._fates = Fates(state.fates)
            self._moments = RewardMoments(state.reward_count, state.reward_mean, state.reward_squares)
            logger.info("resumed from %s at step %d, epoch %d", found.folder, step, epoch)
        self._lineage = Lineage(PolicyVersion(epoch=epoch, step=step), {**starts, epoch: step})
        self._take(self._stream.claim_all(token))
        self._ack()
        metrics.POLICY_STEP.set(step)
        return self.standing()

    def standing(self) -> Standing:
        """Where the learner stands."""
        version = self._lineage.version
        return Standing(version.epoch, version.step, self._fates.as_dict())

    def learn(self, *, partial: bool = False) -> Learned:
        """Takes all scored groups; drops the unfit ones; steps when enough are fit, or with any when `partial`."""
        self._stream.relay()
        while entries := self._stream.read_scored(CONSUMER, READ_AT_ONCE, 0):
            self._take(entries)
        fit = self._judge_waiting()
        wanted = self._config.groups.groups_per_step
        if len(fit) < wanted and not (partial and fit):
            return Learned(self.standing(), stepped=False)
        figures = self._step(fit[:wanted])
        if self._lineage.version.step % self._config.checkpoint.every_steps == 0:
            self.checkpoint()
        return Learned(self.standing(), stepped=True, metrics=figures)

    def checkpoint(self) -> None:
        """Writes a checkpoint of the present state, then acks what it contains. Nothing new: nothing is written."""
        version = self._lineage.version
        state = LearnerState(
            run_id=self._stream.run_id, version=version, starts=dict(self._lineage.starts),
            fates=self._fates.as_dict(), reward_count=self._moments.count, reward_mean=self._moments.mean,
            reward_squares=self._moments.squares,
        )  # fmt: skip
        if state != self._saved:
            with metrics.CHECKPOINT_SECONDS.time():
                self._trainer.save(self._checkpoints.begin(version))
                self._checkpoints.complete(state)
            self._saved = state
        self._ack()

    def _take(self, entries: Sequence[tuple[str, ScoredGroup]]) -> None:
        for entry_id, group in entries:
            if group.id in self._fates or group.id in self._waiting:
                self._to_ack.append(entry_id)
            else:
                self._waiting[group.id] = (entry_id, group)

    def _judge_waiting(self) -> list[JudgedGroup]:
        """The fit groups in the order they came; the others leave with their word."""
        fit = []
        for _, group in list(self._waiting.values()):
            judged = judge_group(group, self._lineage, self._config)
            if judged.fate == "trained":
                fit.append(judged)
            else:
                self._leave(judged, judged.fate)
        return fit

    def _step(self, groups: Sequence[JudgedGroup]) -> dict[str, float]:
        discount = self._config.grpo.turn_discount
        rewards = [value for group in groups for turn in group.by_turn(discount) for _, value in turn]
        moments = self._moments.with_rewards(rewards)
        figures = self._trainer.step(_items(groups, self._config, moments))
        self._moments = moments
        version = self._lineage.version
        self._lineage = Lineage(PolicyVersion(epoch=version.epoch, step=version.step + 1), self._lineage.starts)
        for group in groups:
            self._leave(group, "measured" if self._config.stage == "frozen" else "trained")
        figures = {**figures, **group_figures(groups), "groups_waiting": float(len(self._waiting))}
        metrics.observe_step(self._lineage.version.step, figures)
        return figures

    def _leave(self, judged: JudgedGroup, fate: Fate) -> None:
        self._fates.leave(judged.group.id, fate)
        metrics.GROUPS.labels(fate).inc()
        entry_id, _ = self._waiting.pop(judged.group.id)
        self._to_ack.append(entry_id)

    def _ack(self) -> None:
        if self._to_ack:
            self._stream.ack(self._to_ack)
            self._to_ack = []


def _items(groups: Sequence[JudgedGroup], config: LearnerConfig, moments: RewardMoments) -> list[TrainItem]:
    """What the stage makes of the groups."""
    if config.stage == "frozen":
        return []
    if config.stage == "self_supervised":
        from learner.self_supervised import reinforce_items

        return reinforce_items(groups, config.self_supervised)
    from learner.contrastive import train_items

    return train_items(groups, config.grpo, moments)


def group_figures(groups: Sequence[JudgedGroup]) -> dict[str, float]:
    """What the trained groups say about the policy: rewards, outcomes, novelty, staleness."""
    scored = [pair for group in groups for pair in group.scored()]
    samples = [sample for sample, _ in scored]
    rewards = [reward for _, reward in scored]
    distances = [s.edit_distance for s in samples if s.edit_distance is not None]

    def share(test: Callable[[ScoredSample], bool]) -> float:
        return sum(test(sample) for sample in samples) / max(len(samples), 1)

    return {
        "groups": float(len(groups)),
        "samples": float(len(samples)),
        "reward_mean": sum(rewards) / max(len(rewards), 1),
        "reward_max": max(rewards, default=0.0),
        "accepted_share": share(lambda s: s.evaluation is not None and s.evaluation.outcome == "accepted"),
        "copy_share": share(lambda s: bool(s.copy_of)),
        "truncated_share": share(lambda s: s.sample.finish_reason == "length"),
        "edit_distance": sum(distances) / len(distances) if distances else 0.0,
        "staleness_max": float(max((group.staleness for group in groups), default=0)),
        **_by_turn(groups),
    }


def _by_turn(groups: Sequence[JudgedGroup]) -> dict[str, float]:
    """Mean reward of each turn, where there are several."""
    if all(group.group.prompt.turns == 1 for group in groups):
        return {}
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    for group in groups:
        for sample, reward in group.scored():
            rewards[sample.sample.turn].append(reward)
    return {f"reward_mean_turn_{turn}": sum(values) / len(values) for turn, values in sorted(rewards.items())}
