"""The records that pass between packages.

Invariants: frozen; unknown fields are refused; equal records are equal bytes of JSON; content hashes cover what a
record is, never where it was found.
"""

from tasks.records.candidate import Candidate
from tasks.records.demonstration import Demonstration
from tasks.records.evaluation import Evaluation, Exemplar, Measurement
from tasks.records.group import PolicyVersion, Prompt, Sample, ScoredGroup, ScoredSample
from tasks.records.sweep import Sweep
from tasks.records.task import Task

__all__ = [
    "Candidate", "Demonstration", "Evaluation", "Exemplar", "Measurement", "PolicyVersion", "Prompt", "Sample",
    "ScoredGroup", "ScoredSample", "Sweep", "Task",
]  # fmt: skip
