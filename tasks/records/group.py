"""What travels between rollout, store and learner: prompts, samples and scored groups."""

from __future__ import annotations

from functools import total_ordering
from typing import Literal

from pydantic import Field

from tasks.records.base import Record
from tasks.records.candidate import Candidate
from tasks.records.evaluation import Evaluation

FinishReason = Literal["stop", "length", "abort"]


@total_ordering
class PolicyVersion(Record):
    """Version of the policy's weights; `epoch` grows at each learner restart, `step` at each optimizer step."""

    epoch: int = Field(default=0, ge=0)
    step: int = Field(default=0, ge=0)

    def __lt__(self, other: PolicyVersion) -> bool:
        return (self.epoch, self.step) < (other.epoch, other.step)

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"


class Prompt(Record):
    """One prompt of the policy; its id names the group of its samples."""

    id: str
    run_id: str
    task_id: str
    task_hash: str
    device_type: str
    text: str
    """The whole prompt after the chat template."""
    token_ids: tuple[int, ...] = ()
    exemplar_hashes: tuple[str, ...] = ()
    """Candidate hashes of the exemplars shown, worst first."""
    exemplar_speedups: tuple[float, ...] = ()
    strategy: str = "buckets"
    held_out: str = ""
    """Held-out set that its group measures: never trained on."""
    turns: int = Field(default=1, ge=1)
    """Turns of its group's samples."""
    turn: int = Field(default=0, ge=0)
    """The turn that this is the prompt of; the first is 0."""
    messages: tuple[tuple[str, str], ...] = ()
    """Role and text of each message before the chat template; kept where there are further turns."""


class Sample(Record):
    """One draw of the policy. `policy_versions` and `logprobs` run along `token_ids`.

    `logprobs` are the sampler's own processed log-probabilities (nats), at the sampling temperature. With several turns
    each turn is a sample of its own: in a group of G conversations, turn t of conversation i has index t x G + i.
    """

    id: str
    """`<prompt id>/<index>`: unique within the run."""
    prompt_id: str
    index: int = Field(ge=0)
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    policy_versions: tuple[PolicyVersion, ...] = ()
    """One entry when the whole sample has one version, else one per token."""
    finish_reason: FinishReason = "stop"
    candidate: Candidate | None = None
    """None when no code could be read from the text."""
    turn: int = Field(default=0, ge=0)
    prompt_token_ids: tuple[int, ...] = ()
    """Prompt of a later turn; empty in the first, which answers the group's prompt."""


class ScoredSample(Record):
    """A sample with its evaluation; `evaluation` is None only for a cancelled sample."""

    sample: Sample
    evaluation: Evaluation | None
    copy_of: str = ""
    """Candidate hash of the shown exemplar, or own earlier answer, that the normalised source equals; empty for new
    work."""
    edit_distance: float | None = None
    """Relative distance (0 = equal, 1 = nothing shared) to the nearest shown exemplar; None without exemplars."""


class ScoredGroup(Record):
    """All samples of one prompt, later turns included, each of which left exactly once: what the learner trains on."""

    id: str
    run_id: str
    prompt: Prompt
    samples: tuple[ScoredSample, ...]
