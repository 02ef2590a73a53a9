"""The evaluator's section of the configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from evaluator.compile.config import CompileConfig
from evaluator.judgement.defences import ALL_DEFENCES
from evaluator.judgement.rules import Rules
from tasks.config import Section
from tasks.records.evaluation import Protocol, RulesName

SandboxLayer = Literal["user", "mount", "net", "ipc", "pid", "landlock", "seccomp"]


class Deadlines(Section):
    """How long the parts of an evaluation may take, in seconds."""

    load_s: float = Field(default=30.0, gt=0)
    """Importing the candidate and constructing its model, builds not counted."""
    warm_s: float = Field(default=120.0, gt=0)
    """The first call of a candidate, which may tune itself."""
    call_s: float = Field(default=10.0, gt=0)
    """One later call."""
    candidate_s: float = Field(default=120.0, gt=0)
    """The whole candidate, builds not counted."""
    reference_s: float = Field(default=300.0, gt=0)
    """Admission of a task in the reference server."""
    start_s: float = Field(default=120.0, gt=0)
    """Start of the zygote, which imports torch."""


class SandboxConfig(Section):
    """Isolation of the candidate's worker."""

    layers: tuple[SandboxLayer, ...] = ("user", "mount", "net", "ipc", "pid", "landlock", "seccomp")
    """Layers to try; those that the machine refuses are left out and missing in the record."""
    allow_unsandboxed: bool = False
    """Run candidates also where no layer at all is possible."""
    scratch_mib: int = Field(default=512, ge=1)
    """Size of the candidate's private folder."""


class TimingConfig(Section):
    """The paired timing."""

    half_width: float = Field(default=0.02, gt=0, lt=1)
    """Relative half-width of the speedup's interval at which `sequential` stops."""
    reward_half_width: float = Field(default=0.03, gt=0, lt=1)
    """The same for `reward`."""
    confidence: float = Field(default=0.98, gt=0.5, lt=1)
    """Nominal confidence of the interval."""
    clock: Literal["device", "latency"] = "device"
    """What a call's time is on an accelerator: that of its kernels on the device, launched ahead and run back to back,
    or what a caller waits for from an idle device on, launches included. On CPU it is always the latter."""
    cap_s: float = Field(default=4.0, gt=0)
    """Wall time after which a timing stops with the interval it has."""
    paper_window_s: float = Field(default=1800.0, gt=0)
    """Window of the `paper` protocol, whatever the intervals say."""
    confirm_above: float = Field(default=3.0, gt=1)
    """A speedup above it is measured again on fresh seeds; in a run so is a new best of its task."""


class EvaluatorConfig(Section):
    """The evaluator."""

    protocol: Protocol = "sequential"
    """Timing protocol: `sequential`, `reward` (cheap, for training) or `paper` (CUDA-L1's rules)."""
    rules: RulesName = "strict"
    """What the judge accepts; single rules are set in `rule`."""
    rule: dict[str, str | int | float] = Field(default_factory=dict)
    """Single rules that differ from the preset, such as `output_lifetime = "next_call"`."""
    defences_off: tuple[str, ...] = ()
    """Defences to turn off by name, for tests of the evaluator itself; the record lists those that were on."""
    threads: int = Field(default=1, ge=1)
    """Threads of each arm on CPU."""
    memory_limit_mib: int = Field(default=4096, ge=64)
    """Private resident memory at which a worker is ended."""
    check_draws: int = Field(default=6, ge=2)
    """Calls of the check on inputs as the task draws them."""
    timing: TimingConfig = TimingConfig()
    deadlines: Deadlines = Deadlines()
    sandbox: SandboxConfig = SandboxConfig()
    compile: CompileConfig = CompileConfig()
    pool: dict[str, int] = Field(default_factory=dict)
    """Number of evaluators per device type, such as `{H100 = 4, cpu = 1}`."""
    candidates_at_once: int = Field(default=3, ge=1, le=16)
    """On an accelerator, how many candidates an evaluator of a run works on: one is timed, which excludes all others,
    while the builds of the others go on; between timings they are loaded and checked side by side. On CPU it is one."""
    control_every: int = Field(default=50, ge=0)
    """In a run, each evaluator measures the reference against itself after this many evaluations; 0 never does."""
    control_bias: float = Field(default=0.01, gt=0)
    """Largest bias of these controls, relative, above which the run raises an alarm."""
    lock_timeout_s: float = Field(default=600.0, gt=0)
    """How long a timing waits for another evaluator's on the same device."""

    @field_validator("defences_off")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unknown = sorted(set(names) - set(ALL_DEFENCES))
        if unknown:
            raise ValueError(f"there is no defence {', '.join(unknown)}; there are {', '.join(ALL_DEFENCES)}")
        return names

    @field_validator("rule")
    @classmethod
    def _rules_exist(cls, rule: dict[str, Any]) -> dict[str, Any]:
        try:
            Rules.preset("strict", **rule)
        except ValidationError as error:
            first = error.errors()[0]
            key, known = str(first["loc"][0]), [name for name in Rules.model_fields if name != "name"]
            if first["type"] == "extra_forbidden":
                raise ValueError(f"there is no rule {key}; there are {', '.join(known)}") from None
            raise ValueError(f"{key}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
        return rule
