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

OUTCOMES: dict[Outcome, str] = {
    "accepted": "Right on every call, measured, and within the rules; the record holds the measurement.",
    "rejected": "The candidate is at fault, for one reason: the first in the order of this page's reasons.",
    "unscored": "Nothing is said about the candidate, since something else failed; evaluate it again.",
}
STEPS: dict[Step, str] = {
    "screen": "The source is looked at: whether it parses and mentions `ModelNew`.",
    "compile": "A kernel that the candidate asked for was built.",
    "load": "The source is imported and the model constructed, in a confined worker.",
    "warm": "First calls on throw-away inputs, in which a candidate may compile and tune itself.",
    "check": "Calls on fresh secret inputs, with changed parameters and beyond what `get_inputs` draws.",
    "probe": "Calls before an idle window and under a tracer: whether work goes on, and whose it was.",
    "time": "Paired timing with the reference, every call compared.",
    "confirm": "The timing once more on fresh seeds, where a speedup is large or a record; in a run also the review.",
}
REJECTIONS: dict[RejectionReason, str] = {
    "contract": "The source does not parse, defines no usable `ModelNew`, or does not take the reference's parameters.",
    "compile_error": "A kernel does not compile; the detail holds the compiler's own text.",
    "forged_result": "The worker sent what it may not send, or its clock claims what the judge's does not show.",
    "tampering": "It replaced functions of torch or Python's library, or ended a process of the evaluator.",
    "timeout": "It did not finish in time; the message says what hung.",
    "crash": "It raised an exception, left early (with code 0 too) or was ended by a signal.",
    "lazy_output": "Its output is no plain tensor with memory of its own, or was still being written after the return.",
    "input_mutation": "It changed its inputs.",
    "aliasing": "Its output shares memory with an input, a parameter, an earlier result or itself.",
    "constant_output": "On a task whose output hardly depends on the input, it does not look at the input.",
    "caching": "Its answer belongs to an earlier call.",
    "hyperparameter": "It computes with another constant than the reference; a word for readers, no defence yields it.",
    "precision_downgrade": "Every call errs as much as half precision does, where the task declares more.",
    "incorrect": "A value, a shape, a type or a buffer is wrong; the detail holds the first wrong place.",
    "state_leak": "The same inputs gave another result the second time.",
    "stream_escape": "The reference ran slower beside it than alone: work runs on outside of its turn.",
    "timing_escape": "It computed after the return, or its turns have no possible times.",
    "resource_abuse": "It kept or took too much memory, left processes behind, or starved the reference.",
    "fallback": "The work is not its own: the reference, a compiler wrapper, a handler's result, an idle kernel.",
    "not_confirmed": "A large or record speedup did not come back on fresh seeds.",
    "review": "A reviewing model takes it for a cheat, where `review.mode` is `binding`.",
}
UNSCORED: dict[UnscoredReason, str] = {
    "device_fault": "The device failed its health probe or could not be used.",
    "evaluator_lost": "A process of the evaluator died or did not answer.",
    "no_space": "A disk or the compile cache is full.",
    "sandbox_unavailable": "No layer of isolation works on this machine, or a worker could not be confined.",
    "reference_failed": "The task's own reference fails.",
    "too_large": "Two calls of the task do not fit into memory beside their copies.",
    "other_rejected": "The other candidate of `--against` was rejected, so there is nothing to compare with.",
    "baseline_failed": "The reference does not work under torch.compile or as a CUDA graph here.",
}
"""One sentence for each word; `docs/labels.md` is made of them."""

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
