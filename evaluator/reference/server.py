"""The reference server: one trusted process per task that draws inputs, knows the answers and compares.

Invariants: it never sees candidate code; what it shares with a candidate are expendable copies in arenas of their own,
its inputs, expected results, budgets and seeds lie elsewhere; it reads a candidate's results only while the candidate
is stopped, after a snapshot into private memory. The reference that is timed runs in an arm of its own, forked like
the candidate's; this process is never timed.
"""

from __future__ import annotations

import logging
import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from socket import socket
from typing import Any

from evaluator.judgement.facts import CallResult
from evaluator.reference.comparison import Leaves, compare_call, same_bits
from evaluator.reference.parameters import Style
from evaluator.reference.placement import Placement
from evaluator.reference.placement_cuda import placement_of
from evaluator.reference.reference import TASK_FILE, Reference
from evaluator.worker import native, wire
from evaluator.worker.backend import Backend, create
from evaluator.worker.phases import failure
from evaluator.worker.tree import flatten
from tasks.records.evaluation import Step
from tasks.records.task import Precision

logger = logging.getLogger(__name__)

Answer = dict[str, Any]
"""`fds` in it are descriptors that travel beside the message and stay open here."""
Row = dict[str, Any]

_HISTORY_CALLS = 12
_HISTORY_PARAMETERS = 3


class Server:
    """State of one server: the reference, one placement of arenas, and the calls drawn last."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.reference: Reference
        self.placement: Placement
        self._draws: list[dict[str, Any]] = []
        self._history: deque[dict[str, Any]] = deque(maxlen=_HISTORY_CALLS)
        self._parameters: deque[tuple[int | None, Style]] = deque(maxlen=_HISTORY_PARAMETERS)
        self._compared = 0

    def open(self, fds: list[int], precision: Precision, mode: str, seed: int, known: bool) -> Answer:
        """Loads the task and admits it; answers what the judge must know to run candidates.

        `fds` are the source and, where an earlier admission is `known`, its JSON.
        """
        self.backend.open()
        self.reference = reference = Reference.load(wire.read_text(fds[0]), precision, mode, seed, self.backend)
        self.placement = placement_of(reference, self.backend)
        reference.admit(seed, wire.read_text(fds[1]) if known else None)
        self.backend.trim()
        admission = reference.admission
        specs = {name: native.spec_of(value) for name, value in reference.state().items()}
        return {
            "op": "opened", "arguments": flatten(reference.arguments, native.is_tensor).form, "train": reference.train,
            "dtype": str(reference.dtype).removeprefix("torch."),
            "state": {name: [spec.dtype, list(spec.shape)] for name, spec in specs.items()},
            "bytes_per_call": self.placement.bytes_per_call, "call_ms": reference.call_ns / 1e6,
            "leaves": len(reference.input_bytes) + len(reference.output_bytes), "kinds": list(admission.domain.kinds),
            "degenerate": admission.degenerate, "passed": list(admission.passed), "randomness": admission.randomness,
            "repeats": admission.repeats, "poison_shows": admission.poison_shows, "mutated": reference.mutated,
            "parameters_matter": admission.parameters_matter, "gradients": reference.gradients,
            "free_bytes": self.backend.memory()[0], "shares_snapshots": self.backend.shares_snapshots,
        }  # fmt: skip

    def admission(self, fds: list[int]) -> Answer:
        """What the admission found, as JSON, for another server of the same task."""
        wire.write_text(fds[0], self.reference.admission.model_dump_json())
        return {"op": "admission"}

    def place(self, slots: int, seed: int) -> Answer:
        """New arenas for `slots` calls, at new offsets; their descriptors go to the judge and on to the worker."""
        shared = self.placement.make(slots, random.Random(seed))
        return {
            "op": "placed", "specs": self.placement.argument_specs, "drop": self.placement.drop,
            "fds": [arena.descriptor for arena in shared if arena.descriptor >= 0],
            "handles": [arena.handle for arena in shared if arena.handle is not None],
        }  # fmt: skip

    def collect(self, which: str, calls: int) -> Answer:
        """Takes the results of an arm's turn into private memory."""
        self.placement.collect(which, calls)
        return {"op": "collected"}

    def work(self) -> Answer:
        """What one call of the task has to move, and the arithmetic of the reference's products and convolutions."""
        reference = self.reference
        state = sum(native.nbytes_of(value) for value in reference.state().values())
        return {
            "op": "work", "input_bytes": sum(reference.input_bytes), "output_bytes": sum(reference.output_bytes),
            "parameter_bytes": state, "flops": reference.flops(),
        }  # fmt: skip

    def health(self) -> Answer:
        """Whether the device computes what it should."""
        return {"op": "health", "well": self.reference.health()}

    def parameters(self, seed: int | None, style: Style) -> Answer:
        """Parameters as constructed or random from a seed, in the reference and as a copy in the parameter arena."""
        self._parameters.append((seed, style))
        self.reference.set_parameters(seed, style)
        return {"op": "took", "entries": self.placement.write_state(self.reference.state())}

    def forget(self) -> Answer:
        """A new candidate begins: nothing of the last one counts as an earlier answer."""
        self._history.clear()
        self._parameters.clear()
        self.reference.set_parameters(None)
        self._draws = []
        self._compared = 0
        self.placement.forget()
        return {"op": "forgot"}

    def draw(self, draws: list[dict[str, Any]]) -> Answer:
        """Fresh inputs for the next turn of both arms; output slots are poisoned."""
        self._history.extend(self._draws)
        self._draws = draws
        write, inputs = self.placement.write_call, self.reference.inputs
        return {"op": "drawn", "calls": [write(index, inputs(draw)) for index, draw in enumerate(draws)]}

    def compare(self, results: list[Row], expected: list[Row], step: Step, reloaded: bool) -> Answer:
        """Judges the results in the candidate's output arena against those in the reference arm's, call by call."""
        place = self.placement
        place.take_snapshot(len(self._draws))
        verdicts: list[dict[str, Any] | None] = []
        constructed = not self._parameters or self._parameters[-1][0] is None
        for index, (answer, told, draw) in enumerate(zip(results, expected, self._draws, strict=True)):
            right = place.leaves(place.expected, index, told["leaves"])
            outputs = self._comparable(index, answer["leaves"], right)
            if outputs is None:
                verdicts.append(None)
                continue
            if not outputs:
                kind, seed = draw["kind"], int(draw["seed"])
                lost = CallResult(
                    kind=kind, step=step, reloaded=reloaded, seed=seed, aspects=("unwritten",), loose_ok=False
                )
                verdicts.append(lost.model_dump(mode="json"))
                continue
            budget = self.reference.budget(draw["kind"], constructed=constructed)
            result = compare_call(
                outputs, right, budget, earlier=self._earlier(index),
                pattern=place.poison_pattern(right), step=step, reloaded=reloaded,
                seed=int(draw["seed"]), call=self._compared + index,
            )  # fmt: skip
            verdicts.append(result.model_dump(mode="json"))
        self._compared += len(self._draws)
        return {
            "op": "compared", "calls": verdicts, "inputs_changed": place.changed_inputs(len(self._draws)),
            "guards_broken": place.broken_guards(),
        }  # fmt: skip

    def buffers(self, names: list[str]) -> Answer:
        """Which of the buffers that both sides have written differ beyond rounding."""
        return {"op": "buffered", "wrong": [name for name in names if self.placement.state_differs(name)]}

    def late(self) -> Answer:
        """How many results in the output arena differ from the last snapshot."""
        return {"op": "late", "writes": self.placement.changed_results(len(self._draws))}

    def relate(self, leaves: list[Row], expected: list[Row]) -> Answer:
        """Whether the candidate's and the reference's results of the first two calls are equal bit for bit."""
        place = self.placement
        place.take_snapshot(2)
        right = [place.leaves(place.expected, i, expected) for i in (0, 1)]
        given = [self._comparable(i, leaves, right[i]) for i in (0, 1)]
        same = bool(given[0] and given[1]) and same_bits(given[0] or [], given[1] or [])
        return {"op": "related", "candidate": same, "reference": same_bits(right[0], right[1])}

    def _comparable(self, index: int, leaves: list[Row], expected: Leaves) -> Leaves | None:
        """The snapshot's tensors; None where paths, shapes or kinds of dtype are not the reference's.

        Nothing at all where a wider dtype did not fit into its slot, so that nothing was delivered.
        """
        if [leaf["path"] for leaf in leaves] != [path for path, _ in expected]:
            return None
        for leaf, (_, tensor) in zip(leaves, expected, strict=True):
            shape, stride = tuple(leaf["shape"]), tuple(leaf["stride"])
            dtype = native.DTYPES.get(leaf["dtype"])
            if shape != tuple(tensor.shape) or dtype is None:
                return None
            if dtype is not tensor.dtype and not (dtype.is_floating_point and tensor.is_floating_point()):
                return None
            if len(stride) != len(shape) or not native.dense(shape, stride):
                return None
        return (
            self.placement.leaves(self.placement.snapshot, index, leaves) if self.placement.fits(index, leaves) else []
        )

    def _earlier(self, index: int) -> Iterator[Leaves]:
        """Right answers of earlier calls, made again when they are needed.

        First those of the newest calls, then those of this call under parameters that were drawn and loaded before.
        Those as constructed are left out: their answer is also that of code which skips what they do not show.
        """
        reference = self.reference
        for draw in [*self._draws[:index], *reversed(self._history)]:
            yield reference.answer(draw)
        newest: tuple[int | None, Style] = self._parameters[-1] if self._parameters else (None, "near")
        for chosen in list(self._parameters)[:-1]:
            if chosen[0] is None:
                continue
            reference.set_parameters(*chosen)
            answer = reference.answer(self._draws[index])
            reference.set_parameters(*newest)
            yield answer


OPERATIONS = (
    "open", "admission", "place", "parameters", "forget", "draw", "collect", "compare", "buffers", "late", "relate",
    "health", "work",
)  # fmt: skip


def serve(channel: socket, settings: dict[str, Any]) -> None:
    """Serves the judge until it closes the channel; a failed request is answered, never fatal."""
    backend = create(str(settings.get("runtime", "")))
    server = Server(backend)
    handlers: dict[str, Callable[..., Answer]] = {name: getattr(server, name) for name in OPERATIONS}
    os.sched_setaffinity(0, set(settings["cores"]))
    wire.send(channel, {"op": "ready"})
    while True:
        try:
            request, descriptors = wire.receive_trusted(channel)
        except wire.WireClosed:
            return
        operation = str(request.pop("op"))
        try:
            answer = handlers[operation](**request, **({"fds": descriptors} if descriptors else {}))
            backend.settle()
        except (Exception, SystemExit) as error:
            level = logging.DEBUG if operation == "open" else logging.WARNING  # mostly the task's own code fails there
            logger.log(level, "the reference server failed in %s", operation, exc_info=True)
            answer = failure(operation, error, TASK_FILE)
        wire.send(channel, answer, answer.pop("fds", ()))
        for number in descriptors:
            os.close(number)
