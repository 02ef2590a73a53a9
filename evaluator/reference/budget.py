"""The error budget: how far a right answer may lie from the reference's.

A tile of a candidate's output may differ from the reference's in RMS by `rms_rel` x RMS of the tile + `rms_floor` x
RMS of the entry (of the first dimension) that it is part of + `rms_abs` x RMS of the whole leaf, and in its largest
element by the `max` fields in the same units. Budgets are made by the oracle, one for each kind of draw; they are
JSON and hold no tensors.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from evaluator.judgement.facts import DrawKind
from tasks.records.task import Precision

LONGEST = 16384
"""Longest running sum that the floor covers; a longer one has to be summed in blocks, as everybody does."""


class Allowance(BaseModel):
    """Constants of a declared precision, in the floor's case in units of its machine epsilon.

    `multiple` is how many times the reference's own error a candidate may err. It has to cover a plain sequential sum
    beside a blocked one (5 to 10 times in fp32 at a length of 4096) and stay far below a downgrade (260 times for
    TF32). The floor covers a reference that is exact up to its last rounding, such as one that accumulates in double.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    epsilon: float
    multiple: float
    floor_rms: float
    floor_max: float
    running_sum: float = 0.0
    """Floor in RMS of a plain running sum over n elements, over the square root of n; it errs by 0.22 on average."""

    def floors(self, longest: int) -> tuple[float, float]:
        """Floor in RMS and in maximum, relative, for a task whose longest dimension is `longest`."""
        rms = max(self.floor_rms, self.running_sum * math.sqrt(min(longest, LONGEST)))
        return rms * self.epsilon, rms * self.epsilon * self.floor_max / self.floor_rms


ALLOWANCES: dict[Precision, Allowance] = {
    "fp32": Allowance(epsilon=2.0**-23, multiple=16.0, floor_rms=16.0, floor_max=64.0, running_sum=0.75),
    "fp16": Allowance(epsilon=2.0**-10, multiple=4.0, floor_rms=1.0, floor_max=4.0),
    "bf16": Allowance(epsilon=2.0**-7, multiple=4.0, floor_rms=1.0, floor_max=4.0),
}


class LeafBudget(BaseModel):
    """Budget of one tensor of the output; `exact` leaves (integers, bools) must be equal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = "0"
    exact: bool = False
    rms_rel: float = Field(default=0.0, ge=0)
    max_rel: float = Field(default=0.0, ge=0)
    rms_floor: float = Field(default=0.0, ge=0)
    max_floor: float = Field(default=0.0, ge=0)
    rms_abs: float = Field(default=0.0, ge=0)
    max_abs: float = Field(default=0.0, ge=0)
    half_rms_rel: float = Field(default=0.0, ge=0)
    """Largest RMS error of a tile, over the tile's RMS, of the reference's own half-precision path; 0 where unknown."""


class ErrorBudget(BaseModel):
    """Budget of a task's whole output for one kind of draw."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: DrawKind = "as_given"
    precision: Precision = "fp32"
    leaves: tuple[LeafBudget, ...] = ()
    oracle: Literal["float64", "assumed"] = "float64"
    """`assumed` where the reference cannot run in float64: fixed allowances of the precision instead."""
    note: str = ""

    def leaf(self, path: str) -> LeafBudget:
        """The budget of the leaf at `path`; raises KeyError for a leaf that the reference does not return."""
        for leaf in self.leaves:
            if leaf.path == path:
                return leaf
        raise KeyError(path)
