"""The bench: one candidate's worker beside the warm reference, and what the judge may do with the two.

Invariants: at any time at most one of them runs; every call of the candidate gets inputs drawn from a secret seed, and
every result is compared before the next inputs are drawn; the worker sees expendable copies; what the worker says is
parsed by a closed schema before anything else looks at it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evaluator.judgement.facts import CallResult, DrawKind
from evaluator.observed import Observed
from evaluator.timing.clock import ArmTurn
from evaluator.timing.turns import Arm, ArmFault
from evaluator.worker import schema, wire
from tasks.records.evaluation import Step

if TYPE_CHECKING:
    from evaluator.session import WarmReference


class Ended(Exception):
    """The evaluation of this candidate is over: the facts say why."""


@dataclass(frozen=True)
class Draw:
    """How the inputs of one call are made; `sparse` replaces a few elements by those of another draw."""

    seed: int
    kind: DrawKind = "as_given"
    sparse: int | None = None

    @classmethod
    def fresh(cls, rng: random.Random, kind: DrawKind = "as_given") -> Draw:
        """A draw from a new secret seed."""
        return cls(rng.getrandbits(48), kind)

    def to_wire(self) -> dict[str, Any]:
        return {"seed": self.seed, "kind": self.kind, "sparse": self.sparse}


@dataclass(frozen=True)
class Calls:
    """Inputs that lie ready in the arenas: the request's `calls`, and how they were drawn."""

    draws: tuple[Draw, ...]
    wired: list[dict[str, Any]]


class Bench:
    """Two arms, the arenas between them, and the facts that come of it.

    `rng` makes every secret of the evaluation; `ends_at_s` is the candidate's deadline on the monotonic clock.
    """

    def __init__(
        self,
        reference: WarmReference,
        worker: Arm,
        observed: Observed,
        rng: random.Random,
        ends_at_s: float,
        call_s: float,
    ) -> None:
        self.reference = reference
        self.worker = worker
        self.observed = observed
        self.reloaded = False
        self.step: Step = "load"
        self.each = False
        """Deliver each result before the next call: for rules under which results die there."""
        self.rng = rng
        self.ends_at_s = ends_at_s
        self._call_s = call_s
        self._loads = 0
        self.slots = 0

    def ask(
        self, request: dict[str, Any], expected: type[schema.Answer], timeout_s: float, descriptors: Sequence[int] = ()
    ) -> tuple[Any, int]:
        """One turn of the worker; returns the parsed answer and the span in ns.

        Raises Ended, with the reason in the observed facts, when the worker fails in any way.
        """
        left_s = self.ends_at_s - time.monotonic()
        served_s = self.worker.served_s
        try:
            turn = self.worker.take(request, max(0.0, min(timeout_s, left_s)), descriptors)
            answer = schema.parse(turn.answer, expected)
        except wire.WireForged as error:
            self.observed.channel_error = str(error)
            raise Ended from error
        except ArmFault as fault:
            self._note(fault)
            raise Ended from fault
        finally:
            self.ends_at_s += self.worker.served_s - served_s
        if isinstance(answer, schema.Failed):
            self.observed.failed(answer, self.step)
            raise Ended
        return answer, turn.span_ns

    def _note(self, fault: ArmFault) -> None:
        if fault.kind == "forged":
            self.observed.channel_error = str(fault)
        else:
            self.observed.end(fault.kind, self.step, str(fault))

    def place(self, slots: int) -> dict[str, Any]:
        """Fresh arenas for `slots` calls on both sides; returns the server's answer."""
        placed = self.reference.ask({"op": "place", "slots": slots, "seed": self.rng.getrandbits(64)})
        try:
            self.ask({"op": "map"}, schema.Mapped, 10.0, placed.descriptors)
        finally:
            for number in placed.descriptors:
                os.close(number)
        self.slots = slots
        return dict(placed.answer)

    def load_parameters(self, seed: int | None) -> None:
        """The same parameters on both sides: new random ones from `seed`, or those as constructed for None."""
        taken = self.reference.ask({"op": "parameters", "seed": seed})
        answer, _ = self.ask({"op": "parameters", "entries": taken.answer["entries"]}, schema.Took, self._call_s)
        self.observed.parameter_mismatch = tuple([*answer.missing, *answer.unexpected][:20])
        self._loads += 1
        self.reloaded = self._loads > 1

    def draw(self, draws: Sequence[Draw]) -> Calls:
        """Fresh inputs in the first slots of both sides; output slots are poisoned."""
        drawn = self.reference.ask({"op": "draw", "draws": [draw.to_wire() for draw in draws]})
        return Calls(tuple(draws), drawn.answer["calls"])

    def reference_turn(self) -> ArmTurn:
        """One burst of the reference on the inputs drawn last."""
        turn = self.reference.ask({"op": "run"})
        self.observed.reference_ran(turn.answer)
        return ArmTurn(tuple(turn.answer["stamps"]), turn.span_ns)

    def candidate_turn(self, calls: Calls, *, hold: bool = False, timeout_s: float | None = None) -> tuple[ArmTurn, Any]:
        """One burst of the candidate; returns the turn and its parsed answer."""
        request = {"op": "run", "calls": calls.wired, "hold": hold, "each": self.each}
        answer, span_ns = self.ask(request, schema.Ran, timeout_s or self.burst_s(len(calls.draws)))
        if len(answer.results) != len(calls.draws) or len(answer.stamps) != len(calls.draws) + 1:
            self.observed.channel_error = "an answer for another number of calls"
            raise Ended
        return ArmTurn(tuple(answer.stamps), span_ns), answer

    def secret(self) -> int:
        """A new secret seed."""
        return self.rng.getrandbits(48)

    def burst_s(self, calls: int) -> float:
        """Deadline of a burst: one call's limit, and for the other calls what they took before, doubled."""
        return self._call_s + min((calls - 1) * self._call_s, 2.0 * calls * self.observed.candidate_call_s)

    def compare(self, calls: Calls, answer: Any) -> list[CallResult | None]:
        """Judges the results that lie in the output arena; None for a call whose shapes already differ."""
        results = [result.model_dump() for result in answer.results]
        request = {"op": "compare", "results": results, "step": self.step, "reloaded": self.reloaded}
        verdict = self.reference.ask(request).answer
        compared = [CallResult.model_validate(call) if call else None for call in verdict["calls"]]
        self.observed.compared(compared, answer.results, verdict)
        return compared

    def pair(self, draws: Sequence[Draw], *, reference_first: bool, hold: bool = False) -> tuple[ArmTurn, ArmTurn]:
        """One turn of each arm on the same inputs, in the given order, with every call compared."""
        calls = self.draw(draws)
        if reference_first:
            reference = self.reference_turn()
        candidate, answer = self.candidate_turn(calls, hold=hold)
        if not reference_first:
            reference = self.reference_turn()
        self.compare(calls, answer)
        self.observed.memory(self.worker.watch(), len(draws))
        return reference, candidate
