"""What an augmentation has come to, as a pure function of its journal.

Invariants: `apply` is the only way to change it; what is open, due or finished follows from the entries alone; costs
and tokens count every answer once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.augment.journal import Answered, Entry, Judged, Refused, Skipped
from tasks.records import Demonstration, Task

IMPORT = "import:"
"""What the teacher of an imported kernel is called, with the name of its set behind it."""


@dataclass
class Pair:
    """One teacher's work on one task."""

    answers: dict[int, Answered] = field(default_factory=dict)
    verdicts: dict[int, Judged] = field(default_factory=dict)
    refused: str = ""

    @property
    def successes(self) -> int:
        """Kernels kept."""
        return sum(judged.verdict == "accepted" for judged in self.verdicts.values())

    @property
    def unjudged(self) -> list[Answered]:
        """Answers that were bought and not judged yet."""
        return [answer for index, answer in sorted(self.answers.items()) if index not in self.verdicts]

    def finished(self, *, attempts: int, successes: int) -> bool:
        """Whether nothing more is to be asked."""
        return bool(self.refused) or self.successes >= successes or len(self.answers) >= attempts


@dataclass
class AugmentState:
    """Everything that the entries say."""

    pairs: dict[tuple[str, str], Pair] = field(default_factory=dict)
    """By teacher and task hash."""
    skipped: dict[str, Skipped] = field(default_factory=dict)
    """Tasks that cannot be evaluated, by hash."""
    known: dict[tuple[str, str], Judged] = field(default_factory=dict)
    """First verdict of each candidate, by task hash and candidate hash; unscored ones are none."""
    cost: float = 0.0

    @classmethod
    def replay(cls, entries: Iterable[Entry]) -> AugmentState:
        """The state after these entries."""
        state = cls()
        for entry in entries:
            state.apply(entry)
        return state

    def pair(self, teacher: str, task_hash: str) -> Pair:
        """A teacher's work on a task, made empty where there is none."""
        return self.pairs.setdefault((teacher, task_hash), Pair())

    def apply(self, entry: Entry) -> None:
        """Takes one entry in."""
        match entry:
            case Answered():
                self.pair(entry.teacher, entry.task_hash).answers[entry.index] = entry
                self.cost += entry.cost
            case Judged():
                self.pair(entry.teacher, entry.task_hash).verdicts[entry.index] = entry
                if entry.candidate_hash and entry.verdict != "unscored":
                    self.known.setdefault((entry.task_hash, entry.candidate_hash), entry)
            case Refused():
                self.pair(entry.teacher, entry.task_hash).refused = entry.message
            case Skipped():
                self.skipped.setdefault(entry.task_hash, entry)

    def demonstrations(self) -> list[Demonstration]:
        """What is kept, in the order of teachers, tasks and attempts."""
        return [
            judged.demonstration
            for _, pair in sorted(self.pairs.items())
            for _, judged in sorted(pair.verdicts.items())
            if judged.demonstration is not None
        ]


def summarize(state: AugmentState, tasks: Sequence[Task]) -> dict[str, Any]:
    """Figures by teacher and in all; also what `summary.json` holds."""
    teachers: dict[str, dict[str, Any]] = {}
    for (teacher, _), pair in sorted(state.pairs.items()):
        one = teachers.setdefault(
            teacher,
            {"answers": 0, "verdicts": Counter(), "reasons": Counter(), "tasks_with_success": 0, "refused": 0,
             "prompt_tokens": 0, "new_tokens": 0, "cost": 0.0},
        )  # fmt: skip
        one["answers"] += len(pair.answers)
        one["refused"] += bool(pair.refused)
        one["tasks_with_success"] += pair.successes > 0
        for judged in pair.verdicts.values():
            one["verdicts"][judged.verdict] += 1
            one["reasons"][judged.reason] += bool(judged.reason)
        for answer in pair.answers.values():
            one["prompt_tokens"] += answer.prompt_tokens
            one["new_tokens"] += answer.new_tokens
            one["cost"] += answer.cost
    for one in teachers.values():
        one["reasons"] = {reason: count for reason, count in one["reasons"].items() if count}
        one["verdicts"] = dict(one["verdicts"])
    solved = {judged.task_hash for pair in state.pairs.values() for judged in pair.verdicts.values()
              if judged.verdict == "accepted"}  # fmt: skip
    return {
        "tasks": len(tasks),
        "tasks_with_success": sum(task.content_hash in solved for task in tasks),
        "skipped": {entry.task_id: entry.reason for entry in state.skipped.values()},
        "kept": len(state.demonstrations()),
        "cost": state.cost,
        "teachers": teachers,
    }
