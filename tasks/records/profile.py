"""Where the time of an accepted candidate goes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Bound = Literal["", "memory", "arithmetic"]


class Part(BaseModel):
    """Base of the parts of a profile: frozen, no unknown field."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ProfileRow(Part):
    """One operator of PyTorch, or one kernel of the device."""

    name: str
    kind: Literal["operator", "kernel"]
    calls: float = Field(ge=0)
    """Launches in one call of the model."""
    us: float = Field(ge=0)
    """Own time in one call, in microseconds, under the profiler."""
    share: float = Field(ge=0, le=1)
    """Of the time of all rows of its kind."""
    bytes: int | None = None
    """Operands read and written in one call, each counted once; None where that is not known."""


class Profile(Part):
    """What was seen after the timing, in the candidate's own process, beside what the reference server knows."""

    calls: int = Field(default=0, ge=0)
    """Profiled calls."""
    rows: tuple[ProfileRow, ...] = ()
    """By falling time."""
    bytes_per_call: int | None = None
    """Inputs, parameters and outputs, each moved once: what any kernel of the task has to move."""
    flops_per_call: int | None = None
    """Arithmetic of the reference's products and convolutions; None where it has none to count."""
    gb_per_s: float | None = None
    """`bytes_per_call` over the measured time of a call."""
    peak_gb_per_s: float | None = None
    """Of the device's memory, from its properties."""
    peak_gflop_per_s: float | None = None
    """Of the device's fp32 units, from its properties."""
    roofline: float | None = None
    """The least time that the device's memory and arithmetic allow, over the measured time."""
    bound: Bound = ""
    """Which of the two that least time comes from."""
    unknown: tuple[str, ...] = ()
    """What could not be known, one sentence each."""
    commands: tuple[str, ...] = ()
    """Command lines that look deeper."""
