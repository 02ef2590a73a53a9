"""The task: a reference PyTorch module to be beaten."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from pydantic import Field

from tasks.records.base import Record, digest
from tasks.records.source import normalised_source

Precision = Literal["fp32", "fp16", "bf16"]
Mode = Literal["as_given", "eval"]


class Task(Record):
    """A reference in KernelBench's convention: `Model`, `get_inputs()`, `get_init_inputs()`.

    The content hash identifies a task whatever its path or id: it covers the normalised source, the declared
    precision and the mode.
    """

    id: str = Field(min_length=1)
    """How a user names it: `kernelbench:2/18`, `procedural:row_norm/17`, `softmax.py`; unique within a run."""
    source: str = Field(min_length=1)
    name: str = ""
    suite: str = "file"
    level: int | None = None
    family: str = ""
    """Procedural family; empty for tasks from elsewhere."""
    composition: tuple[str, ...] = ()
    """Sub-skills the task combines, sorted; the unit of the composition split."""
    precision: Precision = "fp32"
    mode: Mode = "as_given"

    @cached_property
    def content_hash(self) -> str:
        """64 hex digits over normalised source, precision and mode."""
        return digest("task", normalised_source(self.source), self.precision, self.mode)
