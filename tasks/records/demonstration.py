"""A demonstration: a verified kernel with the words that came with it, for supervised fine-tuning."""

from __future__ import annotations

from tasks.records.base import Record
from tasks.records.candidate import Candidate
from tasks.records.evaluation import Measurement
from tasks.records.task import Task


class Demonstration(Record):
    """One accepted candidate of a teacher or of an imported set; a line of what `kontrast augment` writes."""

    task: Task
    candidate: Candidate
    analysis: str = ""
    """The teacher's performance analysis; empty where the kernel came alone."""
    design: str = ""
    """The teacher's description of the algorithm; empty where the kernel came alone."""
    teacher: str
    """Name of the teacher, or `import:<name>`."""
    device_type: str
    measurement: Measurement
