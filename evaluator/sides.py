"""The two sides of a measurement: the reference and the candidate, each a model in a worker process of its own.

Invariants: both sides are forked from the same zygote, confined alike and driven by the same requests, so that nothing
but the model differs; whatever a side answers is parsed by a closed schema; a failure of the candidate's side is noted
as a fact and ends the evaluation, one of the reference's side is never the candidate's fault by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from evaluator.observed import Observed
from evaluator.timing.clock import ArmTurn
from evaluator.timing.turns import Arm, ArmFault, Turn
from evaluator.worker import schema, wire


class Ended(Exception):
    """The evaluation of this candidate is over: the facts say why."""


class ReferenceFailed(RuntimeError):
    """The reference cannot be run; the text says why."""


Which = Literal["reference", "candidate"]


class Side:
    """One model in its worker. `class_name` is `Model` or `ModelNew`; `ends_at_s` is on the monotonic clock."""

    def __init__(self, which: Which, arm: Arm, layers: Sequence[str], observed: Observed, call_s: float) -> None:
        self.which: Which = which
        self.class_name = "Model" if which == "reference" else "ModelNew"
        self.arm = arm
        self.layers = tuple(layers)
        self.call_s = call_s
        self.last_call_s = 0.0
        self.quickest_call_s = math.inf
        """A call of the quickest turn so far: what a call takes when nothing disturbs it."""
        self.quickest_launch_ns = 0
        """The least time that a call kept its caller, where the device works on after it; medians of bursts."""
        self.lead_ns = 0
        """What the device's clock leaves a call for its launch; 0 for the clock `latency`."""
        self.ends_at_s = float("inf")
        self.load_ends_at_s = float("inf")
        self.names: dict[str, str] = {}
        """What this side calls the entries of the reference's state, where it calls them otherwise."""
        self._observed = observed
        self.last_failure = ""
        """How the side failed, in words."""
        self.collect: Callable[[int], int] | None = None
        """Takes the results of so many calls away; returns when that was done, on the judge's clock. The span ends
        then, where a stopped worker's device may work on."""

    def ask(
        self, request: dict[str, Any], expected: type[schema.Answer], timeout_s: float, descriptors: Sequence[int] = ()
    ) -> tuple[Any, Turn]:
        """One turn; returns the parsed answer and the turn. Raises Ended or ReferenceFailed when the side fails."""
        left_s = max(0.0, min(timeout_s, self.ends_at_s - time.monotonic()))
        served_s = self.arm.served_s
        try:
            turn = self.arm.take(request, left_s, descriptors)
            answer = schema.parse(turn.answer, expected)
        except wire.WireForged as error:
            raise self._failed("forged", str(error)) from error
        except ArmFault as fault:
            raise self._fault(fault, expected) from fault
        finally:  # builds count against no deadline
            self.ends_at_s += self.arm.served_s - served_s
        if isinstance(answer, schema.Failed):
            raise self._raised(answer)
        return answer, turn

    def _raised(self, answer: schema.Failed) -> Exception:
        if self.which == "candidate" and answer.kind == "CompileError":
            self._observed.build_failed(answer.text)
            return Ended()
        kind = "contract" if answer.kind == "NotAModel" else "exception"
        where = f", line {answer.line}" if answer.line else ""
        text = " ".join(answer.text.split())[:400]
        return self._failed(kind, f"{answer.kind}: {text} (in {answer.stage}{where})")

    def _fault(self, fault: ArmFault, expected: type[schema.Answer]) -> Exception:
        """The failure for a fault; a forged message counts before the death that followed it."""
        if fault.answer is not None:
            try:
                schema.parse(fault.answer, expected)
            except wire.WireForged as error:
                return self._failed("forged", str(error))
        return self._failed(fault.kind, str(fault))

    def detach(self) -> None:
        """What this side does from here on is no fact of its evaluation."""
        self._observed = Observed()

    def _failed(self, kind: str, text: str) -> Exception:
        self.last_failure = text
        if self.which == "reference":
            return ReferenceFailed(f"the reference failed: {text}")
        if kind == "forged":
            self._observed.channel_error = text
        else:
            self._observed.end(kind, text)
        return Ended()

    def open(self) -> None:
        """Makes the side's context on the device. Raises Ended or ReferenceFailed."""
        self.ask({"op": "open"}, schema.Opened, 60.0)

    def load(self, source: int, timeout_s: float) -> bool:
        """Runs the source (a descriptor) as a module; whether it defines the class."""
        request = {"op": "load", "class_name": self.class_name}
        answer, _ = self.ask(request, schema.Loaded, timeout_s, (source,))
        return bool(answer.defined)

    def construct(self, opened: dict[str, Any], specs: list[Any], timeout_s: float) -> dict[str, list[Any]]:
        """Makes the model; returns dtype and shape of each entry of its state."""
        request = {
            "op": "construct", "class_name": self.class_name, "tree": opened["arguments"], "specs": specs,
            "seed": opened["construct_seed"], "train": opened["train"], "dtype": opened["dtype"],
            "quiet": opened["randomness"] == "dropout",
        }  # fmt: skip
        made, _ = self.ask(request, schema.Constructed, timeout_s)
        return {name: [entry.dtype, entry.shape] for name, entry in made.state.items()}

    def inspect(self) -> schema.Inspected:
        """What the candidate changed in its process, and the compilers that it used."""
        answer, _ = self.ask({"op": "inspect"}, schema.Inspected, 10.0)
        return answer  # type: ignore[no-any-return]

    def map(self, descriptors: Sequence[int], handles: Sequence[Any], drop: bool) -> None:
        """Gives the side its arenas, by descriptors or handles: inputs, outputs, parameters."""
        self.ask({"op": "map", "handles": list(handles), "drop": drop}, schema.Mapped, 10.0, descriptors)

    def parameters(self, entries: dict[str, Any]) -> list[str]:
        """Loads what lies in the parameter arena; returns the names that did not fit."""
        answer, _ = self.ask({"op": "parameters", "entries": self._own(entries)}, schema.Took, self.call_s)
        return [*answer.missing, *answer.unexpected]

    def state(self, entries: dict[str, Any]) -> list[str]:
        """Lets the side write entries of its state into the parameter arena; returns the names that it has not."""
        answer, _ = self.ask({"op": "state", "entries": self._own(entries)}, schema.Wrote, self.call_s)
        return list(answer.missing)

    def _own(self, entries: dict[str, Any]) -> dict[str, Any]:
        return {self.names.get(name, name): entry for name, entry in entries.items()}

    def run(
        self, calls: list[dict[str, Any]], *, hold: bool = False, each: bool = False,
        kept: Sequence[str] | None = None, timeout_s: float | None = None,
    ) -> tuple[ArmTurn, list[schema.Result]]:  # fmt: skip
        """One burst: the turn, and the description of each result, which lies in the output arena.

        Results that are not held are spoiled but for the paths `kept`; none are for None.
        """
        request = {
            "op": "run", "calls": calls, "hold": hold, "each": each, "kept": kept, "lead_ns": self.lead_ns,
        }  # fmt: skip
        answer, turn = self.ask(request, schema.Ran, timeout_s or self.burst_s(len(calls)))
        if len(answer.results) != len(calls) or len(answer.stamps) != len(calls) + 1:
            raise self._failed("forged", "an answer for another number of calls")
        span_ns = turn.span_ns
        if self.collect is not None:
            span_ns += self.collect(len(calls)) - turn.end_ns
        if answer.launch_ns:
            self.quickest_launch_ns = min(self.quickest_launch_ns or answer.launch_ns, answer.launch_ns)
        self.last_call_s = span_ns / 1e9 / len(calls)
        self.quickest_call_s = min(self.quickest_call_s, self.last_call_s)
        return ArmTurn(tuple(answer.stamps), span_ns, turn.ran_ns, turn.waited_ns), answer.results

    def burst_s(self, calls: int) -> float:
        """Deadline of a burst: one call's limit, and for the other calls twice what they took before."""
        return self.call_s + (calls - 1) * min(self.call_s, 2.0 * self.last_call_s + 0.1)
