"""The judged outcome of one candidate, and its measurement."""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from tasks.records.base import Record
from tasks.records.profile import Profile
from tasks.records.task import Precision

Outcome = Literal["accepted", "rejected", "unscored"]
Step = Literal["screen", "compile", "load", "warm", "check", "probe", "time", "confirm"]
Protocol = Literal["sequential", "reward", "paper"]
RulesName = Literal["strict", "paper", "any"]
Baseline = Literal["eager", "compile", "graph", "candidate"]
"""The task's reference as it is, under torch.compile, as a CUDA graph; or another candidate."""

RejectionReason = Literal[
    "incorrect", "constant_output", "hyperparameter", "precision_downgrade", "caching", "state_leak", "lazy_output",
    "stream_escape", "timing_escape", "aliasing", "input_mutation", "tampering", "forged_result", "fallback",
    "resource_abuse", "crash", "timeout", "compile_error", "contract", "not_confirmed", "review",
]  # fmt: skip
UnscoredReason = Literal[
    "device_fault",
    "evaluator_lost",
    "no_space",
    "sandbox_unavailable",
    "reference_failed",
    "too_large",
    "other_rejected",
    "baseline_failed",
]
Reason = RejectionReason | UnscoredReason

REJECTION_REASONS: tuple[str, ...] = get_args(RejectionReason)
UNSCORED_REASONS: tuple[str, ...] = get_args(UnscoredReason)


class Measurement(Record):
    """The paired timing of an accepted candidate.

    `speedup` is t_reference / t_candidate (CUDA-L1, Eq. 2, in the form its protocol defines); the interval is the
    protocol's nominal one. Times are per call, in milliseconds.
    """

    speedup: float = Field(gt=0)
    ci_low: float = Field(gt=0)
    ci_high: float = Field(gt=0)
    confidence: float = Field(default=0.98, gt=0, lt=1)
    reference_ms: float = Field(gt=0)
    candidate_ms: float = Field(gt=0)
    pairs: int = Field(ge=1)
    placements: int = Field(default=1, ge=1)
    protocol: Protocol = "sequential"
    definition: Literal["latency", "device"] = "latency"
    device_type: str = "cpu"
    stopped: Literal["half_width", "futility", "time_cap", "pairs", "window"] = "half_width"
    """Why timing ended: the asked half-width, proven slow, the time cap, or the protocol's fixed count or window."""
    confirmed: bool = False
    """True when fresh seeds gave an agreeing value."""
    clocks: dict[str, Any] = Field(default_factory=dict)
    """Clock, throttle, temperature and power readings beside the turns; empty where a device has none."""


class Evaluation(Record):
    """The outcome of one candidate on one task; what `kontrast evaluate --json` prints."""

    outcome: Outcome
    reason: Reason | None = None
    step: Step
    """The step that decided: where it was rejected or given up, else the last one that ran."""
    message: str = ""
    """One sentence for a person: what happened, and what to do next."""
    labels: tuple[str, ...] = ()
    measurement: Measurement | None = None
    detail: dict[str, Any] = Field(default_factory=dict)
    """Evidence: first wrong index with both values, error against budget, failing seed, compiler text."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """What was observed, before any rule was applied."""
    task_id: str
    task_hash: str
    candidate_hash: str
    device_type: str = "cpu"
    precision: Precision = "fp32"
    protocol: Protocol = "sequential"
    rules: RulesName = "strict"
    defences: tuple[str, ...] = ()
    """Defences that were on."""
    isolation: tuple[str, ...] = ()
    """Sandbox layers that were on in the candidate's worker."""
    seconds_by_step: dict[str, float] = Field(default_factory=dict)
    turns: dict[str, list[Any]] = Field(default_factory=dict)
    """The timed pairs as measured, by column (`evaluator.timing.record`); empty where nothing was timed."""
    seed_commitment: str = ""
    """Hash of the secret seed of this evaluation; the seed itself is in `detail` once the verdict stands."""
    baseline: Baseline = "eager"
    """What the timed reference arm ran, so what the speedup and `reference_ms` are over."""
    against: str = ""
    """Hash of the other candidate where `baseline` is `candidate`."""
    notes: tuple[str, ...] = ()
    """What a person should know of the task beside the verdict, one sentence each."""
    profile: Profile | None = None
    """Where the time goes, where that was asked for and the candidate accepted."""
    shape: dict[str, Any] = Field(default_factory=dict)
    """Constants of the task that were set to other values for this evaluation."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.outcome == "accepted" and (self.reason is not None or self.measurement is None):
            raise ValueError("an accepted evaluation has a measurement and no reason")
        if self.outcome == "rejected" and self.reason not in REJECTION_REASONS:
            raise ValueError(f"a rejected evaluation needs one of {', '.join(REJECTION_REASONS)}")
        if self.outcome == "unscored" and self.reason not in UNSCORED_REASONS:
            raise ValueError(f"an unscored evaluation needs one of {', '.join(UNSCORED_REASONS)}")
        return self


class Exemplar(Record):
    """An accepted candidate with its measurement, as the store keeps it and prompts show it."""

    task_id: str
    task_hash: str
    device_type: str
    precision: Precision = "fp32"
    source: str
    candidate_hash: str
    speedup: float = Field(gt=0)
    """The score shown and bucketed: the interval's lower end under the `reward` protocol, else the estimate."""
    measurement: Measurement
    labels: tuple[str, ...] = ()
    origin: str = ""
    """Seed name or sample id it came from."""
