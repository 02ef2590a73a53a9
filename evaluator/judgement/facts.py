"""What was observed of one candidate, before any rule is applied.

Invariants: a default value means "nothing was seen", so that facts can be judged at any step of an evaluation; nothing
here is an opinion; facts hold no tensors and are stable JSON. What the worker reports can only harm its candidate: no
field filled from the worker is needed for an acceptance.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.records.evaluation import Measurement, Step, UnscoredReason

DrawKind = Literal["as_given", "shifted", "scaled", "flipped", "exact"]
"""How the inputs of a call were drawn; `exact` are small integers on which a linear task makes no rounding error."""

Aspect = Literal["masks", "budget", "stale", "unwritten"]
"""How a call was wrong: NaN or Inf at other places; error over budget; the value of an earlier call; never written."""


class Fact(BaseModel):
    """Base of the groups of facts: frozen, no unknown field.

    Each field's doc string is its line in `docs/labels.md`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ScreenFacts(Fact):
    """What the free static look at the source found; `hints` are advice and decide nothing."""

    syntax_error: str = ""
    """Where and why the text does not parse; empty for one that does."""
    names_model: bool = True
    """The text mentions `ModelNew` at all."""
    too_long: bool = False
    """The text is longer than a candidate may be."""
    source_bytes: int = 0
    """Length of the source."""
    same_formula: bool = False
    """The class body equals the reference's, names of locals and attributes apart."""
    hints: tuple[str, ...] = ()
    """Advice about words in the text, such as a caught exception; decides nothing."""


class CompileFacts(Fact):
    """What became of builds that the candidate asked for; `error` is the compiler's own text, cut."""

    routes: tuple[str, ...] = ()
    """How kernels were built: `load_inline`, names of compilers that were run."""
    failed: bool = False
    """A build failed and the candidate could not be loaded for it; a failed build it went on without is `OwnWork`."""
    error: str = ""
    """The compiler's own text, cut."""


class Ending(Fact):
    """How the worker ended before its work was done."""

    kind: Literal[
        "contract", "exception", "exit", "signal", "deadline", "memory_limit", "zygote_died", "reference_failed_beside"
    ]
    """What ended it: an unusable `ModelNew`, an exception, an exit, a signal, a deadline, the memory limit, its
    parent's death, or a reference that fails only beside it."""
    step: Step
    """The step in which it ended."""
    detail: str = ""
    """Exception and its first line, exit code, signal name, the deadline that passed."""


class LeafFacts(Fact):
    """One tensor or scalar of an output, as read natively in the worker (no Python method of the object is called)."""

    path: str = "0"
    """Place in the output's tree, such as `0` or `1.hidden`."""
    plain: bool = True
    """The object's type is exactly torch.Tensor or torch.nn.Parameter, or a plain Python scalar."""
    type_name: str = "Tensor"
    """Name of the object's type."""
    attributes: int = 0
    """Entries of the instance's own `__dict__`."""
    layout: str = "strided"
    """`strided`, or a sparse layout."""
    device: str = "cpu"
    """Where its memory lies."""
    dtype: str = "float32"
    """Element type."""
    shape: tuple[int, ...] = ()
    """Sizes of its dimensions."""
    stride: tuple[int, ...] = ()
    """In elements; empty for a scalar."""
    storage_bytes: int = 0
    """Bytes of the memory behind it."""
    needed_bytes: int = 0
    """Bytes from the storage's start to the last element that shape, stride and offset reach."""


class ExpectedLeaf(Fact):
    """What the reference's output has at the same place."""

    path: str = "0"
    """The same place in the reference's output."""
    device: str = "cpu"
    """Where the reference's lies."""
    dtype: str = "float32"
    """The reference's element type."""
    shape: tuple[int, ...] = ()
    """The reference's sizes."""


class OutputFacts(Fact):
    """One distinct description of a whole output, with the reference's beside it."""

    structure: str = "tensor"
    """`tensor`, `scalar`, or nested such as `tuple(tensor,dict(a:tensor))`."""
    expected_structure: str = "tensor"
    """The same of the reference."""
    leaves: tuple[LeafFacts, ...] = ()
    """The candidate's tensors and scalars."""
    expected: tuple[ExpectedLeaf, ...] = ()
    """The reference's."""
    calls: int = 1
    """Calls whose output looked so."""


class Alias(Fact):
    """An output whose memory overlaps something that is not its own."""

    target: Literal["input", "parameter", "earlier_output", "sibling_output"]
    """What it overlaps: an input, a parameter, an earlier result, another part of the same output."""
    path: str = "0"
    """Place in the output's tree."""
    other: str = ""
    """Name of the input, the parameter or the place that it overlaps."""
    reference_too: bool = False
    """The reference's output aliases the same thing."""


class CallResult(Fact):
    """The comparison of one call's output with the reference's on the same input; made by `evaluator.reference`."""

    kind: DrawKind = "as_given"
    """How the inputs were drawn."""
    step: Step = "check"
    """The step of the call."""
    reloaded: bool = False
    """Parameters were changed by load_state_dict since the candidate's first call."""
    aspects: tuple[Aspect, ...] = ()
    """Empty for a right call."""
    half_like: bool = False
    """The error is over budget, yet no larger than that of the reference's own half-precision path."""
    loose_ok: bool = True
    """Within 1e-2 absolute plus 1e-2 relative everywhere (CUDA-L1's and KernelBench's loose rule)."""
    bit_equal: bool = False
    """Every bit equals the reference's."""
    worst_ratio: float = 0.0
    """Largest error over its allowance, over tiles, in maximum or RMS; 1 is the limit. 1e30 stands for infinity."""
    leaf: str = "0"
    """Place of the first wrong element in the output's tree."""
    index: tuple[int, ...] = ()
    """First wrong element."""
    got: str = ""
    """The candidate's value there."""
    expected: str = ""
    """The reference's value there."""
    error: str = ""
    """The error there."""
    allowed: str = ""
    """What the budget allows there."""
    seed: int | None = None
    """Seed of the inputs."""
    call: int = 0
    """Number of the call in its step, from 0."""


class DrawTally(Fact):
    """Calls of one kind of draw, one step, before or after a reload of the parameters."""

    kind: DrawKind
    """How the inputs were drawn."""
    step: Step
    """The step of the calls."""
    reloaded: bool
    """Parameters had been changed before these calls."""
    calls: int = 0
    """Compared calls."""
    right: int = 0
    """Of these, right ones."""
    bit_equal: int = 0
    """Calls equal to the reference in every bit."""
    half_like: int = 0
    """Calls over budget by no more than half precision errs."""
    loose_wrong: int = 0
    """Calls wrong beyond 1e-2 as well."""
    wrong: dict[Aspect, int] = Field(default_factory=dict)
    """Wrong calls by aspect."""
    worst_ratio: float = 0.0
    """Largest error over its allowance."""
    first: dict[Aspect, CallResult] = Field(default_factory=dict)
    """First wrong call of each aspect: the evidence."""


class Determinism(Fact):
    """The same inputs given twice, other calls between."""

    reference_repeats: bool = True
    """The reference gives the same for the same inputs."""
    repeats: int = 0
    """Inputs that were given twice."""
    differing: int = 0
    """Repeats whose outputs differ by more than the error budget allows between two right answers."""


class Degenerate(Fact):
    """A task whose output hardly depends on its input, found at admission, and how the candidate behaves on it."""

    task: bool = False
    """The task is degenerate."""
    adversaries: tuple[str, ...] = ()
    """Adversaries that passed the budget at admission."""
    output_repeats: bool = False
    """The candidate's output is bit-equal over different inputs where the reference's differs."""
    ignores_poison: bool = False
    """Inputs with NaN change the reference's output and not the candidate's."""


class Growth(Fact):
    """Memory kept between calls, counted after the first call, in bytes."""

    host_bytes: int = 0
    """Of this machine's memory."""
    device_bytes: int = 0
    """Of the device's memory, beyond the reference's."""
    bytes_per_call: int = 0
    """Inputs and outputs of one call."""
    calls: int = 0
    """Calls since the first one."""
    still_growing: bool = True
    """The latest calls still added to it: an allocator's reserve levels off, what a candidate keeps does not."""


class Pending(Fact):
    """What went on after forward had returned, seen in an idle window of the check."""

    late_writes: int = 0
    """Calls whose output changed between its return and the end of the idle window."""
    idle_ms: float = 0.0
    """Length of the window."""
    busy_ms: float = 0.0
    """CPU time that the worker used in the window, all threads."""
    processes: int = 0
    """Processes of the candidate that were alive after a call or after the worker's end."""


class TimerFacts(Fact):
    """The worker's own timer against the judge's span, as natural logs of the speedup, and the reference's state."""

    turns: int = 0
    """Timed turns."""
    native_log: float = 0.0
    """Speedup by the workers' own timers."""
    span_log: float = 0.0
    """Speedup by the judge's spans."""
    span_error_log: float = 0.0
    """Half-width of the span's log speedup, as seen on the reference arm."""
    quiet_log: float = 0.0
    """The span's log speedup by its quiet turns alone: the lower quartiles of both arms' overheads."""
    alone_turns: int = 0
    """Turns of one call, for which no later input existed yet."""
    alone_log: float = 0.0
    """The span's log speedup by these."""
    alone_error_log: float = 0.0
    """Half-width of that."""
    reference_slowdown_log: float = 0.0
    """Log of (reference's time beside the worker over its time alone), after one repetition of the turn."""
    slowdown_error_log: float = 0.0
    """Half-width of that."""
    launched_ahead: bool = False
    """Whether native times are a device's, of calls that were launched before their time began."""
    missing_turns: int = 0
    """Turns whose native time is absent, zero, negative or larger than the span allows."""


class OwnWork(Fact):
    """Whose work made the result."""

    compilers: tuple[str, ...] = ()
    """Compiler wrappers that compiled something: torch.compile, jit.script, jit.trace."""
    found_reference: bool = False
    """The candidate got hold of the reference's class or source."""
    calls_traced: int = 0
    """Calls of forward under the tracer."""
    calls_with_swallowed: int = 0
    """Traced calls of forward in which the candidate's own code caught an exception and returned a result."""
    swallowed: tuple[str, ...] = ()
    """Exceptions that it caught and where."""
    kernels_built: int = 0
    """Kernels of its own that were built."""
    kernels_failed: int = 0
    """Builds or launches that failed and were survived."""
    kernels_called: int | None = None
    """Calls into the candidate's own kernels during traced calls; None where that is not observed."""
    output_depends_on_kernel: bool | None = None
    """The output changes when its kernels do nothing; None where that is not observed."""
    custom_share: float | None = None
    """Share of device time in the candidate's own kernels; None where that is not measured."""
    library_share: float | None = None
    """The same of PyTorch's."""
    operators_equal: bool = False
    """One call runs the same sequence of PyTorch operators as the reference."""


class GlobalState(Fact):
    """A tripwire inside the worker: found means tampering, not found means nothing."""

    replaced: tuple[str, ...] = ()
    """Functions of torch, time, json, gc and the like that are no longer the same object."""
    settings: tuple[str, ...] = ()
    """Global settings that differ at rest (outside calls) from those at the start: `torch.num_threads 1->2`."""


class Confirmation(Fact):
    """The same measurement again on fresh seeds, where possible on another device of the type."""

    speedup: float = Field(gt=0)
    """The second value."""
    ci_low: float = Field(gt=0)
    """Lower end of its interval."""
    ci_high: float = Field(gt=0)
    """Upper end."""
    other_device: bool = False
    """It was measured on another device of the type."""


class Infrastructure(Fact):
    """Something of ours failed: never the candidate's doing."""

    reason: UnscoredReason
    """What failed: a reason for no score."""
    step: Step = "check"
    """The step in which it failed."""
    detail: str = ""
    """What happened, and what to do."""


class Facts(Fact):
    """Everything observed of one candidate up to `step`."""

    step: Step = "screen"
    """The last step that began."""
    screen: ScreenFacts = ScreenFacts()
    """What the free look at the source found."""
    compile: CompileFacts = CompileFacts()
    """What became of the candidate's builds."""
    ending: Ending | None = None
    """How the worker ended early; absent for one that did its work."""
    channel_error: str = ""
    """What was off-schema on the worker's channel."""
    parameters: Literal["loaded", "seeded", "none"] = "loaded"
    """How both arms got equal weights; `none` for a task without any."""
    parameters_missing: tuple[str, ...] = ()
    """Parameters and buffers of the reference that matter and that the candidate does not take."""
    outputs: tuple[OutputFacts, ...] = ()
    """Distinct descriptions of outputs seen over all calls."""
    aliases: tuple[Alias, ...] = ()
    """Outputs whose memory is something else's too."""
    earlier_result_changed: bool = False
    """A result that the caller still held changed when a later call ran."""
    inputs_changed: tuple[str, ...] = ()
    """Inputs that differ after a call."""
    buffers_wrong: tuple[str, ...] = ()
    """Buffers that the reference changes in a call and that differ after the candidate's."""
    guards_broken: tuple[str, ...] = ()
    """Guard bands whose pattern changed: `input slot 3 behind`."""
    draws: tuple[DrawTally, ...] = ()
    """Compared calls, counted by draw, step and state of the parameters."""
    determinism: Determinism = Determinism()
    """The same inputs given twice."""
    degenerate: Degenerate = Degenerate()
    """How the candidate behaves on a task whose output hardly depends on its input."""
    growth: Growth = Growth()
    """Memory kept between calls."""
    pending: Pending = Pending()
    """What went on after forward had returned."""
    timers: TimerFacts = TimerFacts()
    """The worker's clock against the judge's, and the reference beside the worker."""
    own_work: OwnWork = OwnWork()
    """Whose work made the result."""
    global_state: GlobalState = GlobalState()
    """Functions replaced and settings changed in the worker."""
    reduced_precision: bool = False
    """Half or TF32 arithmetic was seen: by the error's size, by a flag or by a kernel's name."""
    captured_graph: bool = False
    """The candidate replays a CUDA graph."""
    copy_of: str = ""
    """Hash of the shown exemplar that the normalised source equals."""
    random_reference: bool = False
    """The reference is random; it was compared with its random part off."""
    measurement: Measurement | None = None
    """The paired timing; absent where none ended."""
    span_limited: bool = False
    """The judge's clock is too coarse for all of the speedup; the score is what it shows."""
    unstable: str = ""
    """Why the protocol itself refused its measurement, such as a bucket variance over the paper's 0.005."""
    placement_sd_log: float = 0.0
    """Spread of the speedup between placements beyond the pairs' own noise, in log units."""
    confirmation: Confirmation | None = None
    """The second measurement, where one was due."""
    infrastructure: Infrastructure | None = None
    """A failure of ours; absent where there was none."""
