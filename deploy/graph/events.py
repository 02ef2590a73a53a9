"""The events of a run: every transition of the coordinator, as it is stored in the run's stream.

Invariants: an event is appended to the stream before the state it describes changes; the state of a run is a pure
function of its events; an event carries ids, counts and figures, never token arrays or weights.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

SampleOutcome = Literal["accepted", "rejected", "unscored", "cancelled"]
GroupFate = Literal["trained", "stale", "below_quorum", "zero_variance", "measured"]
Phase = Literal["starting", "seeding", "generating", "evaluating", "learning", "confirming", "closing"]


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    at_s: float = 0.0
    """Unix time at which the transition was decided, in seconds."""


class RunOpened(_Event):
    """A run began; `config_digest` says whether a resume uses the same configuration."""

    kind: Literal["run_opened"] = "run_opened"
    run_id: str
    config_digest: str = ""
    stage: str = "contrastive"


class CoordinatorStarted(_Event):
    """A coordinator process took over; the first one has incarnation 1."""

    kind: Literal["coordinator_started"] = "coordinator_started"
    incarnation: int = Field(ge=1)


class PhaseEntered(_Event):
    """What the run is busy with."""

    kind: Literal["phase_entered"] = "phase_entered"
    phase: Phase


class TaskSkipped(_Event):
    """A task left the run's list, with the counted reason."""

    kind: Literal["task_skipped"] = "task_skipped"
    task_id: str
    reason: Literal["prompt_too_long", "reference_failed", "too_large"]
    message: str = ""


class SeedEvaluated(_Event):
    """A seed kernel was evaluated before the first prompt."""

    kind: Literal["seed_evaluated"] = "seed_evaluated"
    task_id: str
    device_type: str
    name: str
    outcome: Literal["accepted", "rejected", "unscored"]
    reason: str = ""
    speedup: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    reference_ms: float | None = None


class GroupFormed(_Event):
    """A prompt was built and its samples dispatched; their ids are `<group id>/<index>`, index below `size`."""

    kind: Literal["group_formed"] = "group_formed"
    group_id: str
    task_id: str
    device_type: str
    size: int = Field(ge=1)
    policy_step: int = Field(default=0, ge=0)
    """Step of the policy when the prompt was dispatched."""
    turns: int = Field(default=1, ge=1)
    """Turns that the samples are of, in equal shares, turn after turn."""
    held_out: str = ""
    """Held-out set that the group measures; empty for one that is trained on."""
    exemplars: bool = True
    """Whether its prompt may show exemplars."""


SAMPLE_LABELS = {
    "new": "Its normal form equals no seed kernel and no exemplar that its prompt showed.",
    "copy": "Its normal form equals a seed kernel or an exemplar that its prompt showed; it earns no advantage.",
}
"""Labels of an accepted sample, in one sentence each."""


class SampleLeft(_Event):
    """A sample left the run, once, by one of the four ways."""

    kind: Literal["sample_left"] = "sample_left"
    sample_id: str
    group_id: str
    outcome: SampleOutcome
    reason: str = ""
    label: Literal["copy", "new", ""] = ""
    """Of an accepted kernel: equal to a seed or shown exemplar in its normal form, or new."""
    policy_version: str = ""
    speedup: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    reference_ms: float | None = None
    edit_distance: float | None = None
    file: str = ""
    """The accepted kernel, relative to the run folder."""
    review: Literal["", "honest", "cheat", "unsure", "failed"] = ""
    """What the reviewing model said of a large jump; empty where it was not asked."""
    new_tokens: int = 0
    candidate_hash: str = ""


class GroupLeft(_Event):
    """The learner used or dropped a group; `measured` is of one that was never meant to be trained on.

    A learner that resumes from a checkpoint starts a new epoch; a fate of a later epoch replaces an earlier one.
    """

    kind: Literal["group_left"] = "group_left"
    group_id: str
    fate: GroupFate
    epoch: int = Field(default=0, ge=0)


class LineageStarted(_Event):
    """The learner came back from a checkpoint: groups trained only by the lost lineage are pending again."""

    kind: Literal["lineage_started"] = "lineage_started"
    epoch: int = Field(ge=1)
    step: int = Field(ge=0)
    reopened: tuple[str, ...] = ()


class StepLearned(_Event):
    """An optimizer step was taken; `metrics` are the learner's own figures."""

    kind: Literal["step_learned"] = "step_learned"
    epoch: int = Field(ge=0)
    step: int = Field(ge=0)
    metrics: dict[str, float] = Field(default_factory=dict)


class VersionPublished(_Event):
    """The generators hold a new version of the policy."""

    kind: Literal["version_published"] = "version_published"
    epoch: int = Field(ge=0)
    step: int = Field(ge=0)
    seconds_by_phase: dict[str, float] = Field(default_factory=dict)


class KernelConfirmed(_Event):
    """An accepted new kernel was measured again, in full and on fresh seeds."""

    kind: Literal["kernel_confirmed"] = "kernel_confirmed"
    task_id: str
    sample_id: str
    outcome: Literal["accepted", "rejected", "unscored"]
    reason: str = ""
    speedup: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    reference_ms: float | None = None


class HeldOutMeasured(_Event):
    """A policy version was measured on a held-out set; shares and means are over its scored samples.

    Speedups are those that the reward pays; failures, copies of shown exemplars and speedups below 1 count as 0 in the
    mean of the logarithms.
    """

    kind: Literal["held_out_measured"] = "held_out_measured"
    name: str
    """Of the set."""
    device_type: str
    exemplars: bool
    """Whether its prompts showed exemplars."""
    epoch: int = Field(ge=0)
    step: int = Field(ge=0)
    prompts: int
    samples: int
    unscored: int
    """Samples left out: unscored or cancelled."""
    mean_log_speedup: float
    accepted_share: float
    above_share: float
    """Share of samples above 1.05."""
    distinct_accepted: int
    """Different sources among the accepted."""
    copies: int
    edit_distance: float | None = None
    """Mean relative distance of the accepted to the nearest exemplar that their prompt showed; None without any."""


class ControlMeasured(_Event):
    """An evaluator measured a reference against itself; the figures are those of its newest controls, this included.

    They are kept in the store by device type and protocol, so that a run goes on where earlier ones ended.
    """

    kind: Literal["control_measured"] = "control_measured"
    device_type: str
    protocol: str
    task_id: str
    evaluator: str = ""
    outcome: Literal["accepted", "rejected", "unscored"]
    reason: str = ""
    speedup: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    measured: int = 0
    failed: int = 0
    coverage: float = 1.0
    bias_log: float = 0.0
    half_width_log: float = 0.0
    alarm: str = ""
    """What is wrong with the evaluator by its controls, in one sentence; empty while nothing is."""


class RunClosed(_Event):
    """The run ended by itself; a run without this event can be resumed."""

    kind: Literal["run_closed"] = "run_closed"
    status: Literal["finished", "stopped"]


Event = (
    RunOpened | CoordinatorStarted | PhaseEntered | TaskSkipped | SeedEvaluated | GroupFormed | SampleLeft | GroupLeft
    | LineageStarted | StepLearned | VersionPublished | KernelConfirmed | ControlMeasured | HeldOutMeasured | RunClosed
)  # fmt: skip

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def event_from_dict(value: dict[str, Any]) -> Event:
    """Reads one event; raises pydantic.ValidationError on an unknown kind or field."""
    return _ADAPTER.validate_python(value)


def event_to_dict(event: Event) -> dict[str, Any]:
    """The event as plain JSON values."""
    return event.model_dump(mode="json")
