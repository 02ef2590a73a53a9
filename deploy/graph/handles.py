"""What the coordinator needs from the outside, as interfaces; `deploy.graph.run` implements them with Ray actors.

Invariants: every method may be called again after a failure with the same ids and changes nothing the second time; a
completion travels as an opaque reference, so that token arrays never pass through the coordinator.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deploy.graph.events import ControlMeasured, Event, KernelConfirmed, SampleLeft, SeedEvaluated, VersionPublished
from deploy.graph.state import Group
from learner.loop import Learned, Standing
from tasks.errors import KontrastError


class WorkerLost(Exception):
    """The process behind a handle died; its work may be asked for again once it is back."""


class PromptRefused(Exception):
    """A task yields no prompt or no reference; it leaves the run's list with this counted reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[PromptRefused], tuple[str, str]]:
        return PromptRefused, (self.reason, str(self))


class WaitedTooLong(KontrastError):
    """A blocking call did not come back in the time that the configuration gives it."""

    exit_code = 3


class LearnerLost(KontrastError):
    """The learner dies over the same step again and again."""

    exit_code = 3


class NotPublished(KontrastError):
    """New weights could not be brought to every generator."""

    exit_code = 3


class NothingToDo(KontrastError):
    """The run cannot reach its steps: no task is left, or the learner uses none of the groups."""

    exit_code = 3


@dataclass(frozen=True)
class Drawn:
    """A finished completion of one sample; `reference` is whatever the scorer turns back into it."""

    group_id: str
    index: int
    reference: Any
    new_tokens: int = 0
    aborted: bool = False
    """The engine gave it up half-way: it is drawn again, never scored as a whole answer."""


class Journal(Protocol):
    """The run's event stream."""

    async def append(self, event: Event) -> None:
        """Stores the event durably before it returns."""

    async def events(self) -> list[Event]:
        """All events so far, oldest first."""


class Prompts(Protocol):
    """Exemplars, prompts and the store's groups."""

    async def open_group(self, group: Group) -> None:
        """Draws exemplars, builds the prompt and opens the group in the store; raises PromptRefused."""

    async def recorded(self, group: Group) -> list[SampleLeft]:
        """The samples of a group that the store has on record, as events; for a restarted coordinator."""

    async def cancel(self, group: Group, indices: Sequence[int]) -> None:
        """Takes samples out of the group for good; the group completes when nothing else is missing."""


class Generators(Protocol):
    """The engines, as one."""

    def draw(self, group: Group, indices: Sequence[int]) -> AsyncIterator[Drawn]:
        """Completions as they finish: of the group's prompt, or one of a later turn's own prompt; raises WorkerLost."""

    async def sleep(self) -> None:
        """Leaves the device to the other roles; nothing is drawn until `wake`. A dead generator is passed over."""

    async def wake(self) -> None:
        """Undoes `sleep`."""


class Scorers(Protocol):
    """Parsing, evaluation and recording."""

    async def score(self, group: Group, drawn: Drawn, *, last: bool) -> SampleLeft:
        """Evaluates and records one sample.

        An unscored evaluation is recorded only when `last` is set: else it is returned for another attempt
        elsewhere. Raises WorkerLost.
        """

    async def give_up(self, group: Group, drawn: Drawn) -> SampleLeft:
        """Records a sample as `unscored: evaluator_lost` without an evaluator. Raises WorkerLost."""

    async def confirm(self, group: Group, sample_id: str) -> KernelConfirmed:
        """Measures an accepted kernel again, in full, on fresh seeds."""

    async def seed(self, task_id: str, device_type: str) -> Sequence[SeedEvaluated]:
        """Evaluates a task's seed kernels and puts the accepted ones into the store; raises PromptRefused."""

    async def control(self, task_id: str, device_type: str) -> ControlMeasured | None:
        """Measures a task's reference against itself where an evaluator is due for it; None where none is.

        Raises WorkerLost.
        """


class Learner(Protocol):
    """Groups in, weights out."""

    async def standing(self) -> Standing:
        """Where the learner stands, after it has restored its latest checkpoint if it is new."""

    async def learn(self, *, partial: bool) -> Learned:
        """Takes the complete groups; steps when they suffice, or with what there is when `partial` is set."""

    async def publish(self) -> VersionPublished:
        """Sends the current weights to every generator; raises WorkerLost."""

    async def checkpoint(self) -> None:
        """Writes a checkpoint now."""


@dataclass(frozen=True)
class Handles:
    """All of them."""

    journal: Journal
    prompts: Prompts
    generators: Generators
    scorers: Scorers
    learner: Learner
