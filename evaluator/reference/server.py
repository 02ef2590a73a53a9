"""The reference server: one trusted process per task that holds the reference, its inputs and the answers.

Invariants: it never sees candidate code; what it shares are expendable copies in arenas of their own, its inputs,
expected results, budgets and seeds lie in private memory; it reads a candidate's results only while the candidate is
stopped, after a snapshot into private memory. Its reference arm runs the worker's own burst code on memory of the same
kind, so that both arms pay the same.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from socket import socket
from typing import Any

import torch

from evaluator.reference.comparison import Leaves, compare_call
from evaluator.reference.placement import Placement
from evaluator.reference.reference import Reference
from evaluator.worker import burst, native, wire
from evaluator.worker.phases import failure, read_text
from evaluator.worker.tree import flatten

Answer = tuple[dict[str, Any], list[int]]
Handler = Callable[[dict[str, Any], list[int]], Answer]

_HISTORY_CALLS = 12
_HISTORY_PARAMETERS = 3


class Server:
    """State of one server: the reference, one placement of arenas, and the calls drawn last."""

    def __init__(self) -> None:
        self.reference: Reference
        self.placement: Placement
        self._draws: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._expected: list[Leaves] = []
        self._history: deque[dict[str, Any]] = deque(maxlen=_HISTORY_CALLS)
        self._parameter_seeds: deque[int | None] = deque([None], maxlen=_HISTORY_PARAMETERS)
        self._compared = 0

    def open(self, request: dict[str, Any], descriptors: list[int]) -> Answer:
        """Loads the task, admits it, and answers what the judge must know to run candidates."""
        source, seed = read_text(descriptors[0]), int(request["seed"])
        self.reference = reference = Reference.load(source, request["precision"], request["mode"], seed)
        self.placement = Placement(reference)
        reference.admit(seed)
        arguments = flatten(reference.arguments, native.is_tensor)
        return {
            "op": "opened", "arguments": arguments.form, "train": reference.train,
            "dtype": str(reference.dtype).removeprefix("torch."), "parameters": len(reference.state()),
            "state": {name: [str(value.dtype), list(value.shape)] for name, value in reference.state().items()},
            "bytes_per_call": self.placement.bytes_per_call, **reference.admission,
        }, []  # fmt: skip

    def place(self, request: dict[str, Any], descriptors: list[int]) -> Answer:
        """New arenas for `slots` calls, at new offsets; their descriptors go to the judge and on to the worker."""
        self._expected, self._calls = [], []
        shared = self.placement.make(int(request["slots"]), random.Random(request["seed"]))
        return {"op": "placed", "specs": self.placement.argument_specs}, shared

    def parameters(self, request: dict[str, Any], descriptors: list[int]) -> Answer:
        """Parameters as constructed or random from a seed, in the reference and as a copy in the parameter arena."""
        seed = None if request["seed"] is None else int(request["seed"])
        self._parameter_seeds.append(seed)
        self.reference.set_parameters(seed)
        return {"op": "took", "entries": self.placement.write_state(self.reference.state())}, []

    def forget(self, request: dict[str, Any], descriptors: list[int]) -> Answer:
        """A new candidate begins: nothing of the last one counts as an earlier answer."""
        self._history.clear()
        self._parameter_seeds = deque([None], maxlen=_HISTORY_PARAMETERS)
        self._compared = 0
        return {"op": "forgot"}, []

    def draw(self, request: dict[str, Any], descriptors: list[int]) -> Answer:
        """Fresh inputs for the next turn of both arms; output slots are poisoned."""
        self._history.extend(self._draws)
        self._draws = request["draws"]
        self._expected = []
        self._calls = [
            self.placement.write_call(index, self.reference.inputs(draw)) for index, draw in enumerate(self._draws)
        ]
        return {"op": "drawn", "calls": self._calls}, []

    def run(self, request: dict[str, Any], descriptors: list[int]) -> Answer:
        """The reference arm's turn, on the server's own copies of the inputs drawn last."""
        place = self.placement
        calls = burst.read_calls(place.private_inputs, self._calls)
        results, stamps = burst.run_burst(self.reference.model, calls)
        delivery = burst.Delivery(place.expected, place.private_inputs, self.reference.model)
        told = [
            delivery.deliver(result, call["slots"], []) for result, call in zip(results, self._calls, strict=True)
        ]
        self._expected = [place.leaves(place.expected, i, answer["leaves"]) for i, answer in enumerate(told)]
        wanted = [{key: leaf[key] for key in ("path", "device", "dtype", "shape")} for leaf in told[0]["leaves"]]
        aliases = [alias for answer in told for alias in answer["aliases"]]
        return {
            "op": "ran", "stamps": stamps, "expected": wanted, "structure": told[0]["structure"], "aliases": aliases[:64],
        }, []  # fmt: skip

    def compare(self, request: dict[str, Any], descriptors: list[int]) -> Answer:
        """Judges the results in the output arena against the reference's on the same inputs."""
        place = self.placement
        place.take_snapshot(len(self._draws))
        verdicts: list[dict[str, Any] | None] = []
        for index, (answer, expected) in enumerate(zip(request["results"], self._expected, strict=True)):
            draw = self._draws[index]
            outputs = self._comparable(index, answer, expected)
            if outputs is None:
                verdicts.append(None)
                continue
            result = compare_call(
                outputs, expected, self.reference.budget(draw["kind"]), earlier=self._earlier(index),
                pattern=place.poison_pattern(expected), step=request["step"], reloaded=bool(request["reloaded"]),
                seed=int(draw["seed"]), call=self._compared + index,
            )  # fmt: skip
            verdicts.append(result.model_dump(mode="json"))
        self._compared += len(self._draws)
        return {
            "op": "compared", "calls": verdicts, "inputs_changed": place.changed_inputs(len(self._draws)),
            "guards_broken": place.broken_guards(), "buffers_wrong": [],
        }, []  # fmt: skip

    def late(self, request: dict[str, Any], descriptors: list[int]) -> Answer:
        """How many results in the output arena differ from the last snapshot."""
        return {"op": "late", "writes": self.placement.changed_results(len(self._draws))}, []

    def _comparable(self, index: int, answer: dict[str, Any], expected: Leaves) -> Leaves | None:
        """The snapshot's tensors, or None where shapes, dtypes or paths are not the reference's."""
        leaves = answer["leaves"]
        if [leaf["path"] for leaf in leaves] != [path for path, _ in expected]:
            return None
        for leaf, (_, tensor) in zip(leaves, expected, strict=True):
            shape, stride = tuple(leaf["shape"]), tuple(leaf["stride"])
            if shape != tuple(tensor.shape) or native.DTYPES.get(leaf["dtype"]) is not tensor.dtype:
                return None
            if len(stride) != len(shape) or not native.dense(shape, stride):
                return None
        return self.placement.leaves(self.placement.snapshot, index, leaves)

    def _earlier(self, index: int) -> Iterator[Leaves]:
        """Right answers of earlier calls, made again when they are needed: those of the newest calls, then those of
        this call under earlier parameters."""
        reference = self.reference
        for draw in [*self._draws[:index], *reversed(self._history)]:
            yield reference.answer(draw)
        newest = self._parameter_seeds[-1]
        for seed in list(self._parameter_seeds)[:-1]:
            reference.set_parameters(seed)
            answer = reference.answer(self._draws[index])
            reference.set_parameters(newest)
            yield answer


OPERATIONS = ("open", "place", "parameters", "forget", "draw", "run", "compare", "late")


def serve(channel: socket, settings: dict[str, Any]) -> None:
    """Serves the judge until it closes the channel; a failed request is answered, never fatal."""
    server = Server()
    handlers: dict[str, Handler] = {name: getattr(server, name) for name in OPERATIONS}
    arm_cores, other_cores = set(settings["arm_cores"]), set(settings["judge_cores"])
    wire.send(channel, {"op": "ready"})
    while True:
        try:
            request, descriptors = wire.receive_trusted(channel)
        except wire.WireClosed:
            return
        os.sched_setaffinity(0, arm_cores if request["op"] == "run" else other_cores)
        try:
            answer, shared = handlers[request["op"]](request, descriptors)
        except Exception as error:  # noqa: BLE001  the task's code may raise anything
            answer, shared = failure(request["op"], error), []
        wire.send(channel, answer, shared)
        for number in set(descriptors) - set(shared):
            os.close(number)
