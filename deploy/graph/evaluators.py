"""The evaluators of a run: one actor per device, found by GPU type, each with a queue of its own.

An actor works on one candidate at a time, on an accelerator on several: see `evaluator.candidates_at_once`.

Invariants: a candidate goes only to a device of the type it was asked for; candidates of one task stay on one
evaluator, in order, as long as no other of the type is idle while theirs has a queue; confirmations go before
explorations and, where there is another evaluator of the type, to another than the first measurement; an evaluator
that died is asked again only after another one, if there is another; one whose device failed its health probe twice is
not asked again in the run.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.graph.handles import WorkerLost
from deploy.graph.placement import label_selector
from deploy.graph.remote import ask
from deploy.metrics import QUARANTINED
from evaluator.config import EvaluatorConfig
from evaluator.timing.statistics import PlacementHistory
from tasks.errors import KontrastError
from tasks.integrity import check_integrity
from tasks.records import Candidate, Evaluation, Task

_log = logging.getLogger(__name__)
CONFIRMATION, EXPLORATION = 0, 1
FAULTS = 2
"""Failed health probes after which a device is out of use."""


class DevicesOut(KontrastError):
    """No device of a type is fit for use any more."""

    exit_code = 3


@dataclass
class Loads:
    """Who gets the next candidate, among the evaluators of one type; pure."""

    waiting: list[int]
    """Candidates queued or running at each evaluator."""
    at_once: int = 1
    """Candidates that an evaluator works on at a time."""
    home: dict[str, int] = field(default_factory=dict)
    """Task -> the evaluator that holds its reference warm."""
    out: set[int] = field(default_factory=set)
    """Evaluators that are not asked any more."""

    def fit(self) -> list[int]:
        """The others."""
        return [number for number in range(len(self.waiting)) if number not in self.out]

    def choose(self, task: str, avoid: int | None = None) -> int:
        """The task's own evaluator, unless it is busy while another is idle; `avoid` is the one that just failed."""
        free = [number for number in self.fit() if number != avoid] or self.fit()
        least = min(free, key=lambda number: (self.waiting[number], number))
        home = self.home.get(task)
        if home in free and (self.waiting[home] < self.at_once or self.waiting[least] >= self.at_once):
            return home
        self.home[task] = least
        return least

    def elsewhere(self, avoid: Collection[int]) -> int:
        """The least busy evaluator outside `avoid`, else of all; no task moves home for it."""
        others = [number for number in self.fit() if number not in avoid]
        return min(others or self.fit(), key=lambda number: (self.waiting[number], number))


class Gate:
    """One evaluator's queue: so many candidates at a time, by priority, then in order of arrival."""

    def __init__(self, at_once: int = 1) -> None:
        self._free = at_once
        self._arrivals = 0
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []

    async def enter(self, priority: int) -> None:
        """Waits for the turn."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals += 1
        heapq.heappush(self._queue, (priority, self._arrivals, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Passes the turn on."""
        while self._queue:
            *_, turn = heapq.heappop(self._queue)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class EvaluatorPool:
    """Evaluator actors by device type; used from one event loop."""

    def __init__(
        self, actors: Mapping[str, Sequence[Any]], *, attempts: int = 2, control_every: int = 0,
        candidates_at_once: int = 1,
    ) -> None:  # fmt: skip
        """`actors` are handles by device type; a control is due on each after `control_every` evaluations."""
        self._actors = {device_type: list(found) for device_type, found in actors.items()}
        at_once = {device_type: places(device_type, candidates_at_once) for device_type in self._actors}
        self._loads = {
            device_type: Loads([0] * len(found), at_once[device_type]) for device_type, found in self._actors.items()
        }
        self._gates = {
            device_type: [Gate(at_once[device_type]) for _ in found] for device_type, found in self._actors.items()
        }
        self._attempts = attempts
        self._control_every = control_every
        self._faults = {device_type: [0] * len(found) for device_type, found in self._actors.items()}
        self._since = {device_type: [0] * len(found) for device_type, found in self._actors.items()}
        self.histories: dict[str, PlacementHistory | None] = {}
        """By device type, what evaluators are told about placements; whoever keeps the controls sets it."""

    async def evaluate(
        self, task: Task, candidate: Candidate, device_type: str, protocol: str, *, priority: int = EXPLORATION,
        first: Evaluation | None = None,
    ) -> Evaluation:  # fmt: skip
        """Evaluates on a device of the type.

        Raises WorkerLost when the evaluators asked all died over it, DevicesOut when no device of the type is fit.
        The evaluator's name is `detail["evaluator"]`. With `first`, another one than the first evaluation's is asked,
        if there is another.
        """
        loads, avoid = self._loads[device_type], []
        if first is not None:
            avoid = [n for n in range(len(loads.waiting)) if _name(device_type, n) == evaluator_of(first)]
        answer: Evaluation | None = None
        for attempt in range(1, self._attempts + 1):
            if not loads.fit():
                raise DevicesOut(_all_out(device_type, len(loads.waiting)))
            if first is None:
                number = loads.choose(task.content_hash, avoid[-1] if avoid else None)
            else:
                number = loads.elsewhere(avoid)
            try:
                answer = await self._one(number, task, candidate, device_type, protocol, priority)
            except WorkerLost as error:
                _log.warning("attempt %d: %s", attempt, error)
            else:
                if answer.reason != "device_fault":
                    return answer
            avoid.append(number)
        if answer is not None:
            return answer
        raise WorkerLost(f"{self._attempts} evaluators of type {device_type} died over one candidate")

    async def control(self, task: Task, device_type: str, protocol: str) -> Evaluation | None:
        """The reference of a task against itself, on an evaluator that is due for it; None when none is due.

        Raises WorkerLost when the evaluator died over it; the next control is due a whole round later all the same.
        """
        since = self._since[device_type]
        due = [number for number in self._loads[device_type].fit() if 0 < self._control_every <= since[number]]
        if not due:
            return None
        since[due[0]] = 0
        return await self._one(due[0], task, None, device_type, protocol, EXPLORATION)

    async def _one(
        self, number: int, task: Task, candidate: Candidate | None, device_type: str, protocol: str, priority: int
    ) -> Evaluation:
        """One evaluation on one evaluator; without a candidate a control."""
        loads, gate = self._loads[device_type], self._gates[device_type][number]
        loads.waiting[number] += 1
        try:
            await gate.enter(priority)
            try:
                evaluation: Evaluation = await ask(
                    self._actors[device_type][number].evaluate, task, candidate, protocol,
                    self.histories.get(device_type), what=f"evaluator {number} of type {device_type}",
                )  # fmt: skip
                self._since[device_type][number] += candidate is not None
                if evaluation.reason == "device_fault":
                    self._fault(device_type, number)
                detail = {**evaluation.detail, "evaluator": _name(device_type, number)}
                return evaluation.model_copy(update={"detail": detail})
            finally:
                gate.leave()
        finally:
            loads.waiting[number] -= 1

    def _fault(self, device_type: str, number: int) -> None:
        self._faults[device_type][number] += 1
        loads = self._loads[device_type]
        if self._faults[device_type][number] < FAULTS or number in loads.out:
            return
        loads.out.add(number)
        QUARANTINED.labels(device_type).set(len(loads.out))
        _log.warning(
            "evaluator %s is out of use: its device failed the health probe %d times; look for Xid errors in dmesg, "
            "reset the device, then resume the run", _name(device_type, number), FAULTS,
        )  # fmt: skip


def places(device_type: str, candidates_at_once: int) -> int:
    """How many candidates an evaluator of a device type works on at a time."""
    return 1 if device_type == "cpu" else candidates_at_once


def _all_out(device_type: str, count: int) -> str:
    return (
        f"No device of type {device_type} is fit for use: all {count} failed their health probe {FAULTS} times. "
        f"Look for Xid errors in dmesg, reset the devices, then go on with --resume."
    )


def _name(device_type: str, number: int) -> str:
    return f"{device_type}-{number}"


def evaluator_of(evaluation: Evaluation) -> str:
    """Name of the evaluator that made an evaluation in a run; empty for one made elsewhere."""
    return str(evaluation.detail.get("evaluator", ""))


@dataclass
class _Place:
    """Where one candidate at a time is judged: the evaluator of the protocol that was asked for last."""

    protocol: str = ""
    evaluator: Any = None
    task: str = ""


class EvaluatorActor:
    """Owns one device; called from as many threads as it has places."""

    def __init__(self, open_evaluator: Callable[[str], Any], source: str, at_once: int = 1) -> None:
        check_integrity(source)
        self._open = open_evaluator
        self._free = [_Place() for _ in range(at_once)]
        self._changed = threading.Condition()

    def evaluate(
        self, task: Task, candidate: Candidate | None, protocol: str, history: PlacementHistory | None = None
    ) -> Evaluation:
        """Judges one candidate, or without one the reference against itself, where the task is warm if it can be."""
        place = self._taken(task.content_hash, protocol)
        try:
            if place.evaluator is None or protocol != place.protocol:
                if place.evaluator is not None:
                    place.evaluator.close()
                place.evaluator, place.protocol = self._open(protocol), protocol
            place.task = task.content_hash
            place.evaluator.history = history
            evaluation: Evaluation = (
                place.evaluator.control(task) if candidate is None else place.evaluator.evaluate(task, candidate)
            )
            return evaluation
        finally:
            with self._changed:
                self._free.append(place)
                self._changed.notify()

    def _taken(self, task: str, protocol: str) -> _Place:
        """A free place: one that knows the task, else one of the protocol, else any."""
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            best = max(self._free, key=lambda place: (place.protocol == protocol, place.task == task))
            self._free.remove(best)
            return best


def open_evaluator(config: EvaluatorConfig, device: str) -> Callable[[str], Any]:
    """What an actor opens its device with."""

    def opened(protocol: str) -> Any:
        from evaluator import Evaluator

        return Evaluator(device, config.model_copy(update={"protocol": protocol}))

    return opened


def start_evaluators(
    ray: Any, names: Mapping[str, Sequence[str]], source: str, make: Callable[[str], Callable[[str], Any]], *,
    cpus: float, gpus: float, restarts: int, candidates_at_once: int = 1,
) -> dict[str, list[Any]]:  # fmt: skip
    """Starts the named actors of each type on nodes with its label; `make` gives what opens a device of a type."""
    actors: dict[str, list[Any]] = {}
    for device_type, named in names.items():
        options: dict[str, Any] = {
            "num_cpus": cpus, "num_gpus": 0 if device_type == "cpu" else gpus, "max_restarts": restarts,
            "max_task_retries": 0, "max_concurrency": places(device_type, candidates_at_once),
        }  # fmt: skip
        selector = label_selector(device_type)
        if selector is not None:
            options["label_selector"] = selector
        remote = ray.remote(EvaluatorActor)
        actors[device_type] = [
            remote.options(name=name, **options).remote(
                make(device_type), source, places(device_type, candidates_at_once)
            )
            for name in named
        ]
    return actors
