"""A candidate against an opponent: both checked against the reference, then timed in pairs with each other.

The opponent is another candidate, or the reference run in another way (`evaluator.baselines`).

Invariants: each candidate has a server, a reference arm and arenas of its own, and both get the same draws; every timed
call of either is compared with its own reference arm's; in a pair both reference arms run first, untimed, so that the
two candidates begin alike; a fault of the other candidate is never this one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evaluator.baselines import Opponent
from evaluator.bench import Bench, Draw, Style
from evaluator.flow import Flow, Gate
from evaluator.judgement.facts import TimerFacts
from evaluator.sides import Ended
from evaluator.timing.clock import ArmTurn
from evaluator.timing.statistics import Pair, timer_facts
from tasks.figures import interval, times
from tasks.records import Candidate, Evaluation, Measurement, Task

if TYPE_CHECKING:
    from evaluator.config import EvaluatorConfig
    from evaluator.session import Evaluator
    from evaluator.worker.process import Child


class Duel:
    """What a timing needs of a `Bench`, for two: `other`'s candidate takes the reference's place in the pairs."""

    def __init__(self, own: Bench, other: Bench, other_gate: Gate) -> None:
        self.own = own
        self.other = other
        self.observed = own.observed
        self.rng = own.rng
        self.server = own.server
        self.gauges = own.gauges
        self.history = own.history
        self.on = own.on
        self._other_gate = other_gate

    @property
    def lead_ns(self) -> int:
        """What a call of either candidate is left for its launch."""
        return max(self.own.lead_ns, self.other.lead_ns)

    def children(self) -> list[Child]:
        """The processes that a timing keeps busy."""
        return [*self.own.children(), *self.other.children()]

    def extend(self, seconds: float) -> None:
        """Gives both candidates so much longer."""
        for bench in (self.own, self.other):
            bench.extend(seconds)

    def call_ns(self) -> float:
        """What a call of the slower candidate takes."""
        return max(self.own.call_ns(), self.other.call_ns())

    @property
    def reloads(self) -> bool:
        """Whether parameters change in the middle of a timing: only where both take them."""
        return self.own.reloads and self.other.reloads

    def secret(self) -> int:
        """A new secret seed."""
        return self.own.secret()

    def place(self, slots: int) -> None:
        """Fresh arenas for both."""
        for bench in (self.own, self.other):
            bench.place(slots)

    def load_parameters(self, seed: int, style: Style = "near") -> None:
        """The same parameters everywhere."""
        for bench in (self.own, self.other):
            bench.load_parameters(seed, style)

    def pair(self, draws: Sequence[Draw], *, reference_first: bool) -> tuple[ArmTurn, ArmTurn]:
        """One turn of each candidate, the other's as that of the reference, with every call compared."""
        benches = (self.other, self.own)
        calls = [bench.draw(draws) for bench in benches]
        lead_ns = self.lead_ns
        for bench in benches:
            bench.lead(lead_ns)
        for bench, own in zip(benches, calls, strict=True):
            bench.run_reference(own)
        order = (0, 1) if reference_first else (1, 0)
        ran = {index: benches[index].candidate.run(calls[index], each=benches[index].each) for index in order}
        for index, bench in enumerate(benches):
            bench.compare(ran[index][1])
            bench.watch_memory(len(draws))
        theirs, mine = ran[0][0], ran[1][0]
        if not theirs.possible:
            self.other.observed.timers = TimerFacts(turns=1, missing_turns=1)
            self.other.observed.news()
        self._other_gate.pass_or_end()
        return theirs, mine

    def timed(self, pairs: Sequence[Pair], alone: Sequence[Pair]) -> None:
        """Notes what all pairs of a timing, and those of single calls, show of both candidates' timers."""
        self.own.timed(pairs, alone)
        self.other.observed.timers = timer_facts([_swapped(pair) for pair in pairs])
        self.other.observed.news()
        self._other_gate.pass_or_end()


def _swapped(pair: Pair) -> Pair:
    return replace(
        pair, order="candidate_first" if pair.order == "reference_first" else "reference_first",
        reference_ns=pair.candidate_ns, candidate_ns=pair.reference_ns, reference_burst_ns=pair.candidate_burst_ns,
        candidate_burst_ns=pair.reference_burst_ns, reference_span_ns=pair.candidate_span_ns,
        candidate_span_ns=pair.reference_span_ns,
    )  # fmt: skip


class DuelFlow(Flow):
    """One evaluation of one candidate whose timed pair is another candidate and this one."""

    def __init__(
        self, evaluator: Evaluator, task: Task, candidate: Candidate, opponent: Opponent, *, config: EvaluatorConfig,
        confirm: bool, seed: bytes | None = None, profiled: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            evaluator, task, candidate, config=config, confirm=confirm, seed=seed, seats=2, profiled=profiled
        )
        self._opponent = opponent
        rule = {**config.rule, **opponent.rule}
        self._other = Flow(
            evaluator, task, opponent.candidate, config=config.model_copy(update={"rule": rule}), confirm=False,
            seed=self._seed, seat=1, seats=2,
        )  # fmt: skip
        self._duel: Duel | None = None
        self._other_evaluation: Evaluation | None = None

    def _steps(self) -> None:
        own, slots = self._prepare()
        self._duel, theirs = self._challenged(own)
        slots = min(slots, theirs)
        try:
            self._time(self._duel, slots)
        except Ended:
            if not self._gate.closed():
                self._other_failed()
            raise
        self._look_closer(own)

    def _challenged(self, own: Bench) -> tuple[Duel, int]:
        """Loads and checks the other candidate, while this one waits and loses no time by it; the duel and its slots.

        Raises Ended.
        """
        found: list[tuple[Bench, int]] = []
        with self._timed("other"):
            passed = self._other._guarded(lambda: found.append(self._other._prepare()))
        if not passed:
            self._other_failed()
            raise Ended
        own.extend(self._seconds["other"])
        bench, slots = found[0]
        return Duel(own, bench, self._other._gate), slots

    def _other_failed(self) -> None:
        """The other candidate is why there is nothing to compare with."""
        self._other._end_sides()
        found = self._other_evaluation = self._other._concluded()
        words, advice = self._opponent.words, self._opponent.advice
        if found.outcome == "rejected":
            text = f"{words} was rejected ({found.reason}): {found.message}{advice}"
            self._give_up(self._opponent.failed, text[0].upper() + text[1:])
        else:
            self._give_up("evaluator_lost", f"Nothing to compare with: {words} is unscored: {found.message}")

    def _end_sides(self) -> None:
        super()._end_sides()
        self._other._end_sides()

    def _blame_reference(self, text: str) -> None:
        """With two candidates beside it, a reference that fails is neither's proven fault."""
        if self._duel is None:
            super()._blame_reference(text)
            return
        self._evaluator.drop_reference()
        self._give_up("reference_failed", f"{text}, beside two candidates of which either may have harmed it")

    def _evaluation(self) -> Evaluation:
        evaluation = super()._evaluation()
        update: dict[str, Any] = {"baseline": self._opponent.baseline}
        if self._opponent.baseline == "candidate":
            update["against"] = self._opponent.candidate.content_hash
        if evaluation.outcome == "accepted" and evaluation.measurement is not None:
            update["message"] = _message(evaluation.measurement, self._opponent.words)
        if self._other_evaluation is not None:
            about = self._other_evaluation
            found = {"reason": about.reason, "step": about.step, "message": about.message, "detail": about.detail}
            update["detail"] = {**evaluation.detail, "other": found}
        return evaluation.model_copy(update=update)


def _message(measurement: Measurement, words: str) -> str:
    return (
        f"Both right on every call; {times(measurement.speedup)} the speed of {words} "
        f"({interval(measurement.ci_low, measurement.ci_high)})."
    )
