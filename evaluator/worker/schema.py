"""What a worker may answer: one closed schema per request. Anything else on the channel is a forged message.

Invariant: parsing is strict (no coercion, no unknown key, bounded lists and texts), so that a parsed answer is plain
data of known size; what it says is still only a claim.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from evaluator.worker.wire import WireForged

Text = Annotated[str, Field(max_length=4096)]
Short = Annotated[str, Field(max_length=256)]
Names = Annotated[list[Short], Field(max_length=64)]
Count = Annotated[int, Field(ge=0, lt=1 << 60)]
Sizes = Annotated[list[Annotated[int, Field(ge=-(1 << 60), lt=1 << 60)]], Field(max_length=16)]


class Answer(BaseModel):
    """Base: strict, closed, frozen."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Failed(Answer):
    """Candidate code raised."""

    op: Literal["failed"]
    stage: Short
    kind: Short
    text: Text
    line: Count


class Ready(Answer):
    op: Literal["ready"]
    layers: Names


class Opened(Answer):
    op: Literal["opened"]


class Loaded(Answer):
    op: Literal["loaded"]
    defined: bool


class Entry(Answer):
    """Dtype and shape of one parameter or buffer."""

    dtype: Short
    shape: Sizes


class Constructed(Answer):
    op: Literal["constructed"]
    state: Annotated[dict[Short, Entry], Field(max_length=4096)]


class Mapped(Answer):
    op: Literal["mapped"]


class Took(Answer):
    op: Literal["took"]
    missing: Annotated[list[Short], Field(max_length=4096)]
    unexpected: Annotated[list[Short], Field(max_length=4096)]


class Wrote(Answer):
    op: Literal["wrote"]
    missing: Annotated[list[Short], Field(max_length=4096)]


class Leaf(Answer):
    """One tensor of a result; the fields of `judgement.facts.LeafFacts`."""

    path: Short
    plain: bool
    type_name: Short
    attributes: Count
    layout: Short
    device: Short
    dtype: Short
    shape: Sizes
    stride: Sizes
    storage_bytes: Count
    needed_bytes: Count


class Overlap(Answer):
    target: Literal["input", "parameter", "earlier_output", "sibling_output"]
    path: Short
    other: Short


class Result(Answer):
    """What one call returned."""

    structure: Annotated[str, Field(max_length=2048)]
    leaves: Annotated[list[Leaf], Field(max_length=64)]
    aliases: Annotated[list[Overlap], Field(max_length=256)]


class Ran(Answer):
    op: Literal["ran"]
    stamps: Annotated[list[Count], Field(min_length=2, max_length=65)]
    launch_ns: Count
    results: Annotated[list[Result], Field(min_length=1, max_length=64)]


class Redelivered(Answer):
    op: Literal["redelivered"]


class Traced(Answer):
    op: Literal["traced"]
    calls_traced: Count
    calls_with_swallowed: Count
    swallowed: Names


class Inspected(Answer):
    op: Literal["inspected"]
    replaced: Names
    settings: Names
    compilers: Names
    programs: Names
    """Compilers that the candidate ran itself."""


class ProfiledRow(Answer):
    """One operator or kernel, over all profiled calls; `bytes` are those of one call, -1 where they are not known."""

    name: Short
    kind: Literal["operator", "kernel"]
    count: Count
    ns: Count
    bytes: Annotated[int, Field(ge=-1, lt=1 << 60)]


class Profiled(Answer):
    op: Literal["profiled"]
    calls: Annotated[int, Field(ge=1, lt=1 << 20)]
    rows: Annotated[list[ProfiledRow], Field(max_length=64)]


class Sealed(Answer):
    op: Literal["sealed"]


AnyAnswer = Annotated[
    Failed
    | Ready
    | Opened
    | Loaded
    | Constructed
    | Mapped
    | Took
    | Wrote
    | Ran
    | Redelivered
    | Traced
    | Inspected
    | Profiled
    | Sealed,
    Field(discriminator="op"),
]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(AnyAnswer)


def parse(message: dict[str, Any], expected: type[Answer]) -> Any:
    """The answer as `expected` or `Failed`; raises WireForged for anything else."""
    try:
        answer = _ADAPTER.validate_python(message)
    except ValidationError as error:
        raise WireForged(f"an answer that does not fit the schema ({error.error_count()} places)") from error
    if not isinstance(answer, expected | Failed):
        raise WireForged(f"a message {answer.op!r} where {expected.__name__} was due")
    return answer
