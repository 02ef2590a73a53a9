"""What the recorder is given: the work of other packages as functions, and the rules that decide what is recorded.

Invariant: plain values and functions, so that tests put others in their place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from deploy.config import ReviewConfig
from deploy.graph.state import Group
from evaluator.review import Ask
from evaluator.timing.statistics import PlacementHistory
from tasks.records import Candidate, Evaluation, Exemplar, Prompt, Task


class Evaluate(Protocol):
    """Evaluates a candidate somewhere that has the device type; never answers from an earlier result.

    With `first`, the evaluation is to confirm that one: on another evaluator of the type, if there is another.
    """

    def __call__(
        self, task: Task, candidate: Candidate, device_type: str, protocol: str, first: Evaluation | None = None
    ) -> Awaitable[Evaluation]: ...


class Seed(NamedTuple):
    """A kernel known beforehand."""

    name: str
    speed: str
    """Its class of speed."""
    source: str


class Control(Protocol):
    """Measures a task's reference against itself where an evaluator of the type is due for it; None where none is."""

    def __call__(self, task: Task, device_type: str, protocol: str) -> Awaitable[Evaluation | None]: ...


async def no_control(task: Task, device_type: str, protocol: str) -> Evaluation | None:  # noqa: ARG001
    """Nothing is ever due."""
    return None


BuildTurn = Callable[[Prompt, Sequence[tuple[str, Evaluation]]], Prompt]


def no_turns(first: Prompt, history: Sequence[tuple[str, Evaluation]]) -> Prompt:
    """For runs of one turn."""
    raise ValueError(f"turn {len(history)} of {first.id} is asked for, and this run has one turn")


def _forget(device_type: str, history: PlacementHistory | None) -> None:  # noqa: ARG001
    return None


@dataclass(frozen=True)
class Tools:
    """What other packages do for the recorder."""

    build_prompt: Callable[[Task, Sequence[Exemplar], Sequence[Sequence[Exemplar]], Group], Prompt]
    """From the drawn exemplars, and for each the others of its bucket, which may stand in for it; raises PromptRefused
    when the task does not fit."""
    seed_kernels: Callable[[Task], Sequence[Seed]]
    """Seed kernels of a task, none for tasks from elsewhere."""
    evaluate: Evaluate
    control: Control = no_control
    tell: Callable[[str, PlacementHistory | None], object] = _forget
    """Tells the evaluators of a device type what controls have shown of placements."""
    ask: Ask | None = None
    """The reviewing model; None where nobody is asked."""
    build_turn: BuildTurn = no_turns
    """From a group's prompt and what a conversation has answered so far to the prompt of its next turn."""


@dataclass(frozen=True)
class Rules:
    """The parts of the configuration that decide what is recorded."""

    protocol: str = "reward"
    rules: str = "strict"
    exemplars: int = 2
    one_seed_per_speed: bool = False
    """Evaluate one seed kernel of each class of speed, drawn by `seed`, instead of all."""
    keep_samples: bool = False
    """Append every recorded sample to `samples.jsonl`."""
    seed: int = 0
    confirm_above: float = 3.0
    """Score above which a sample is measured again even where it is no new best."""
    evaluators: Mapping[str, int] = field(default_factory=dict)
    """Number of evaluators by device type."""
    max_bias: float = 0.01
    """Bias of the controls above which there is an alarm, relative."""
    review: ReviewConfig = field(default_factory=ReviewConfig)
