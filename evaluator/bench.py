"""The bench: the two sides of one evaluation, the arenas between them, and the server that feeds and compares.

Invariants: at any time at most one of the three processes runs; every call gets inputs drawn from a secret seed, and
every result is compared before the next inputs are drawn; the candidate sees expendable copies.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from evaluator.judgement.defences import ALL_DEFENCES
from evaluator.judgement.facts import CallResult, DrawKind
from evaluator.observed import Observed
from evaluator.sides import Side, Which
from evaluator.timing.clock import MOST_LEAD_NS, ArmTurn
from evaluator.timing.statistics import Pair, timer_facts, with_alone
from evaluator.worker import schema

if TYPE_CHECKING:
    from evaluator.device_cuda import Gauges
    from evaluator.session import WarmReference
    from evaluator.timing.statistics import PlacementHistory
    from evaluator.worker.process import Child

LEAST_LEAD_NS = 100_000
"""Enough for a few kernels that are launched from Python."""
LEAD_FACTOR = 3
"""A launch takes up to three times as long from one turn to the next on a virtual machine's processors."""

Style = Literal["near", "unit", "exact"]
"""How parameters are drawn: see `evaluator.reference.parameters`."""


@dataclass(frozen=True)
class Draw:
    """How the inputs of one call are made.

    `sparse` replaces a few elements by those of another draw, `timed` scales a little as well, `poison` puts NaN
    into them.
    """

    seed: int
    kind: DrawKind = "as_given"
    sparse: int | None = None
    timed: bool = False
    poison: bool = False

    @classmethod
    def fresh(cls, rng: random.Random, kind: DrawKind = "as_given") -> Draw:
        """A draw from a new secret seed."""
        return cls(rng.getrandbits(48), kind)


class Bench:
    """Two sides on one task. `rng` makes every secret of the evaluation."""

    def __init__(self, server: WarmReference, sides: tuple[Side, Side], observed: Observed, rng: random.Random) -> None:
        self.server = server
        self.reference, self.candidate = sides
        self.observed = observed
        self.rng = rng
        self.reloaded = False
        self.each = False
        """Deliver each result before the next call: for rules under which results die there."""
        self.random_parameters = True
        """Whether the rules treat parameters as inputs."""
        self.gauges: Gauges | None = None
        """The device's, where it has any."""
        self.history: PlacementHistory | None = None
        """What earlier controls on the device type have shown of placements."""
        self.on: frozenset[str] = frozenset(ALL_DEFENCES)
        """Names of the defences that are on: the active parts of the others are left out."""
        self.device_clock = False
        """Whether calls are timed by the device's clock."""
        self.compared: list[CallResult | None] = []
        """Comparisons of the inputs drawn last."""
        self._loads = 0
        self._entries: dict[str, Any] = {}
        if not server.opened["shares_snapshots"]:
            for side in sides:
                side.collect = self._collecting(side.which)
        self._draws: tuple[Draw, ...] = ()
        self._expected: list[schema.Result] = []

    def _collecting(self, which: Which) -> Callable[[int], int]:
        """How a side's results reach the server's private memory before its span ends."""

        def collect(calls: int) -> int:
            turn = self.server.ask({"op": "collect", "which": which, "calls": calls})
            return int(turn.end_ns)

        return collect

    def children(self) -> list[Child]:
        """The processes that a timing keeps busy."""
        return [self.server.arm.child, self.candidate.arm.child, self.reference.arm.child]

    def extend(self, seconds: float) -> None:
        """Gives the candidate so much longer."""
        self.candidate.ends_at_s += seconds

    def call_ns(self) -> float:
        """What a call of the slower arm takes: the reference's call, measured at its admission, and what the
        candidate's quickest turn took more than the reference's.

        A turn of few calls is mostly the judge's own overhead, and one alone may have waited for a processor. Bursts
        that are short for it keep their few inputs in the caches: a candidate that lives on memory reads up to twice
        as fast.
        """
        reference_s, candidate_s = self.reference.quickest_call_s, self.candidate.quickest_call_s
        return 1e6 * float(self.server.opened["call_ms"]) + 1e9 * max(0.0, candidate_s - reference_s)

    @property
    def lead_ns(self) -> int:
        """What a call is left for its launch by the device's clock, 0 by the other: by the reference's launches so far.

        The candidate has no say in it: what it takes longer counts as its time, and what it does with its processor
        in the lead, which nothing counts, has no more time than the reference's launch gives it.
        """
        if not self.device_clock:
            return 0
        return min(MOST_LEAD_NS, LEAST_LEAD_NS + LEAD_FACTOR * self.reference.quickest_launch_ns)

    def lead(self, lead_ns: int) -> None:
        """Leaves the calls of both sides so much time for their launches."""
        self.candidate.lead_ns = self.reference.lead_ns = lead_ns

    @property
    def reloads(self) -> bool:
        """Whether parameters change in the middle of a timing."""
        return self.observed.parameters == "loaded" and not self.each and "parameter_tracking" in self.on

    def timed(self, pairs: Sequence[Pair], alone: Sequence[Pair]) -> None:
        """Notes what all pairs of a timing, and those of single calls, show of the candidate's timer."""
        self.observed.timers = with_alone(timer_facts(pairs), alone)

    def secret(self) -> int:
        """A new secret seed."""
        return self.rng.getrandbits(48)

    def place(self, slots: int) -> list[Any]:
        """Fresh arenas for `slots` calls on both sides; returns the specs of the constructors' tensors."""
        placed = self.server.ask({"op": "place", "slots": slots, "seed": self.rng.getrandbits(64)})
        handles, drop = placed.answer["handles"], placed.answer["drop"]
        try:
            self.candidate.map(placed.descriptors[:3], handles[:3], drop)
            self.reference.map(placed.descriptors[3:], handles[3:], drop)
        finally:
            for number in placed.descriptors:
                os.close(number)
        return list(placed.answer["specs"])

    def load_parameters(self, seed: int | None, style: Style = "near") -> None:
        """The same parameters on both sides: new random ones from `seed`, or those as constructed for None."""
        entries = self.server.ask({"op": "parameters", "seed": seed, "style": style}).answer["entries"]
        self._entries = entries
        self.reference.parameters(entries)
        self.observed.parameter_mismatch = tuple(self.candidate.parameters(entries)[:20])
        self._loads += 1
        self.reloaded = self._loads > 1

    def compare_buffers(self) -> None:
        """Compares the buffers that the reference changes in its calls; both sides must have made the same calls."""
        names = self.server.opened["mutated"]
        if not names or self.observed.parameters != "loaded":
            return
        entries = {name: self._entries[name] for name in names}
        self.reference.state(entries)
        missing = self.candidate.state(entries)
        wrong = self.server.ask({"op": "buffers", "names": names}).answer["wrong"]
        self.observed.buffers({*missing, *wrong})

    def draw(self, draws: Sequence[Draw]) -> list[dict[str, Any]]:
        """Fresh inputs in the first slots of both sides; output slots are poisoned."""
        self._draws = tuple(draws)
        drawn = self.server.ask({"op": "draw", "draws": [asdict(draw) for draw in draws]})
        return list(drawn.answer["calls"])

    def run_reference(self, calls: list[dict[str, Any]]) -> ArmTurn:
        """One burst of the reference on the inputs drawn last."""
        turn, self._expected = self.reference.run(calls)
        self.observed.reference_ran(self._expected)
        return turn

    def compare(self, results: list[schema.Result]) -> None:
        """Judges the results of the inputs drawn last; `compared` holds None for a call whose shapes already differ."""
        request = {
            "op": "compare", "results": [result.model_dump() for result in results],
            "expected": [result.model_dump() for result in self._expected], "step": self.observed.step,
            "reloaded": self.reloaded,
        }  # fmt: skip
        verdict = self.server.ask(request).answer
        compared = [CallResult.model_validate(call) if call else None for call in verdict["calls"]]
        self.observed.compared(compared, results, verdict)
        self.compared = compared

    def relate(self, results: list[schema.Result]) -> tuple[bool, bool]:
        """Whether the candidate's, and the reference's, results of the last two calls are equal bit for bit."""
        request = {
            "op": "relate", "leaves": [leaf.model_dump() for leaf in results[0].leaves],
            "expected": [leaf.model_dump() for leaf in self._expected[0].leaves],
        }  # fmt: skip
        related = self.server.ask(request).answer
        return bool(related["candidate"]), bool(related["reference"])

    def pair(self, draws: Sequence[Draw], *, reference_first: bool, hold: bool = False) -> tuple[ArmTurn, ArmTurn]:
        """One turn of each side on the same inputs, in the given order, with every call compared.

        The reference's results are never spoiled, since it may keep memory that it hands out, nor is what the candidate
        hands out in its stead.
        Timed calls are compared for the defence `every_call`.
        """
        calls, kept = self.draw(draws), self.observed.given_again
        self.lead(self.lead_ns)
        if reference_first:
            reference = self.run_reference(calls)
        candidate, results = self.candidate.run(calls, hold=hold, each=self.each, kept=kept)
        if not reference_first:
            reference = self.run_reference(calls)
        if "every_call" in self.on or self.observed.step not in ("time", "confirm"):
            self.compare(results)
        self.watch_memory(len(draws))
        return reference, candidate

    def watch_memory(self, calls: int) -> None:
        """Notes the memory that the sides hold after so many more calls."""
        self.observed.memory(self.candidate.arm.watch(), calls)
        if self.gauges is not None:
            used = [self.gauges.used_bytes(side.arm.child.pid) for side in (self.candidate, self.reference)]
            self.observed.device_memory(*used)
