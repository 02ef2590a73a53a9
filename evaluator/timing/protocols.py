"""Timing protocols as state machines with one interface: `next` plans a pair or stops, `feed` takes its times.

Invariants: no clock and no global randomness here, both are handed in; a spoiled pair is asked for again; what a worker
can see of a plan does not tell which call counts. `create` makes a protocol by name.
"""

from __future__ import annotations

import math
import random
from typing import ClassVar, Protocol

from pydantic import Field

from evaluator.judgement.defences.timer_disagreement import limited
from evaluator.timing.paper import PaperProtocol
from evaluator.timing.plans import Plan, Stop, StopReason, TimingResult
from evaluator.timing.statistics import (
    ASSUMED_PLACEMENT_SD_LOG,
    MIN_PLACEMENTS,
    MIN_PLACEMENTS_WITH_HISTORY,
    Estimate,
    Pair,
    PlacementHistory,
    audit,
    between_processes_log,
    checked,
    estimate,
    timer_facts,
)
from tasks.config import Section
from tasks.records.evaluation import Measurement
from tasks.records.evaluation import Protocol as ProtocolName

FIRST_LOOK = 20
LOOK_GROWTH = 1.5
PAIRS_PER_PLACEMENT = 4
"""Two blocks (ABBA or BAAB) on one placement."""
FUTILE_BELOW = 0.95
"""An interval that ends below this speedup proves the candidate slow."""
EARLY_FUTILITY_PAIRS = 8
CAPPED_PAIRS = 12
"""The time cap waits for this many pairs, up to `OVERTIME` times the cap: fewer make no interval worth having."""
OVERTIME = 3.0
LONG_CALL_MS = 50.0
"""Above this time of a reference call half the pairs are enough at the first look: their noise is small."""


class TimingSettings(Section):
    """Numbers of a protocol run; times in seconds."""

    half_width: float = Field(default=0.01, gt=0, lt=1)
    """Asked half-width of the interval, relative."""
    confidence: float = Field(default=0.98, gt=0.5, lt=1)
    """Nominal coverage of the interval."""
    cap_s: float = Field(default=20.0, gt=0)
    """Timing ends after this time, whatever was reached; up to three times as long for the first twelve pairs."""
    max_pairs: int = Field(default=2000, ge=4)
    """Timing ends after this many pairs, whatever was reached."""
    calls_low: int = Field(default=3, ge=2)
    """Calls of a turn, at least; the first of them is dropped from the estimate."""
    calls_high: int = Field(default=6, ge=2)
    """Calls of a turn, at most."""
    calls_most: int = Field(default=0, ge=0)
    """Bursts may double up to this many calls while the judge's clock cannot resolve the gain; 0 for never."""
    reload: bool = True
    """Whether the parameters change once, before a random pair."""


class TimingProtocol(Protocol):
    """The one interface of all protocols."""

    name: ProtocolName

    def next(self, elapsed_s: float) -> Plan | Stop:
        """The next pair to run, or the end; `elapsed_s` counts from the first turn."""

    def feed(self, pair: Pair) -> None:
        """Takes the times of the pair that was planned last."""

    def result(self, device_type: str = "cpu") -> TimingResult:
        """What was measured; raises ValueError for fewer than two good pairs."""


class Sequential:
    """ABBA/BAAB blocks until the interval is as narrow as asked, the candidate is proven slow, or time is up.

    Looks begin at 20 pairs on five placements (10 where calls are long). With enough `history` they begin at three
    placements: 12 pairs (6), with no less coverage in simulation.
    """

    name: ProtocolName = "sequential"
    early_futility: ClassVar[bool] = False

    def __init__(
        self,
        settings: TimingSettings,
        rng: random.Random,
        *,
        history: PlacementHistory | None = None,
        reference_ms: float = 1.0,
    ) -> None:
        self.settings = settings
        self.pairs: list[Pair] = []
        self.stopped: StopReason | None = None
        self._rng = rng
        self._history = history if history is not None and history.enough else None
        self._scale = 1
        long_calls = reference_ms >= LONG_CALL_MS
        self._per_placement = PAIRS_PER_PLACEMENT // 2 if long_calls else PAIRS_PER_PLACEMENT
        if self._history is not None:
            self._next_look = MIN_PLACEMENTS_WITH_HISTORY * self._per_placement
        else:
            first = FIRST_LOOK // 2 if long_calls else FIRST_LOOK
            self._next_look = max(first, MIN_PLACEMENTS * self._per_placement)
        self._reload_at = rng.randrange(1, self._next_look) if settings.reload else -1
        self._swap = False
        self._planned = -1

    @property
    def good(self) -> int:
        """Good pairs so far."""
        return sum(not pair.spoiled for pair in self.pairs)

    def next(self, elapsed_s: float) -> Plan | Stop:
        good = self.good
        why = self._why_stop(good, elapsed_s)
        if why is not None:
            self.stopped = why
            return Stop(why)
        if good % 2 == 0 and good != self._planned:
            self._swap = self._rng.random() < 0.5
        first_of_block = good % 2 == 0
        repeated = good == self._planned
        self._planned = good
        settings = self.settings
        return Plan(
            pair=good,
            placement=good // self._per_placement,
            order="reference_first" if first_of_block != self._swap else "candidate_first",
            calls=self._scale * self._rng.randint(settings.calls_low, max(settings.calls_low, settings.calls_high)),
            reload=good == self._reload_at and not repeated,
        )

    def feed(self, pair: Pair) -> None:
        self.pairs.append(checked(pair))

    def _why_stop(self, good: int, elapsed_s: float) -> StopReason | None:
        cap_s = self.settings.cap_s * (1.0 if good >= CAPPED_PAIRS else OVERTIME)
        if good >= 2 and elapsed_s >= cap_s:
            return "time_cap"
        if len(self.pairs) >= self.settings.max_pairs:
            return "pairs"
        if self.early_futility and EARLY_FUTILITY_PAIRS <= good < self._next_look and self._surely_slow():
            return "futility"
        if good < self._next_look or good % 2:
            return None
        result = self.estimate()
        self._next_look = max(good + 2, math.ceil(good * LOOK_GROWTH / 2) * 2)
        if result.high < FUTILE_BELOW:
            return "futility"
        if math.expm1(result.half_width_log) <= self.settings.half_width and not self._grow_bursts():
            return "half_width"
        return None

    def _surely_slow(self) -> bool:
        """Early futility: the upper end with an assumed placement effect is below the bound."""
        assumed = PlacementHistory(ASSUMED_PLACEMENT_SD_LOG**2, 1000)
        return estimate(self.pairs, self.settings.confidence, assumed).high < FUTILE_BELOW

    def _grow_bursts(self) -> bool:
        """Doubles the bursts while the span cannot resolve the claimed gain; False when that is settled or in vain."""
        seen = timer_facts(self.pairs)
        _, short = limited(
            seen.native_log, seen.span_log, seen.span_error_log, launched_ahead=seen.launched_ahead
        )  # fmt: skip
        most = self.settings.calls_most
        if not short or not seen.turns or 2 * self._scale * self.settings.calls_high > most:
            return False
        self._scale *= 2
        return True

    def estimate(self) -> Estimate:
        """The estimate over all good pairs so far."""
        return estimate(self.pairs, self.settings.confidence, self._history)

    def result(self, device_type: str = "cpu") -> TimingResult:
        found = self.estimate()
        audited = audit(self.pairs, found)
        seen = timer_facts(self.pairs)
        scored = audited.scored_log
        span_limited = False
        if seen.turns:
            capped, span_limited = limited(
                scored, seen.span_log, seen.span_error_log, launched_ahead=seen.launched_ahead
            )  # fmt: skip
            scored = min(scored, capped)
        good = [pair for pair in self.pairs if not pair.spoiled]
        reference_ms, candidate_ms = per_call_ms(good)
        half_width_log = math.hypot(found.half_width_log, between_processes_log(good))
        measurement = Measurement(
            speedup=math.exp(scored),
            ci_low=math.exp(scored - half_width_log),
            ci_high=math.exp(scored + half_width_log),
            confidence=self.settings.confidence,
            reference_ms=reference_ms,
            candidate_ms=candidate_ms,
            pairs=found.pairs,
            placements=found.placements,
            protocol=self.name,
            device_type=device_type,
            stopped=self.stopped or "pairs",
        )
        return TimingResult(
            measurement=measurement,
            span_limited=span_limited,
            audit_agrees=audited.agrees,
            order_effect_log=found.order_effect_log,
            placement_sd_log=found.placement_sd_log,
            spoiled_pairs=len(self.pairs) - len(good),
        )


class Reward(Sequential):
    """For training: a half-width of 3 %, and slow candidates are given up early."""

    name: ProtocolName = "reward"
    early_futility: ClassVar[bool] = True
    half_width: ClassVar[float] = 0.03


def per_call_ms(pairs: list[Pair]) -> tuple[float, float]:
    """Median time per counted call of each arm, in milliseconds."""
    reference = sorted(pair.reference_ns / pair.calls for pair in pairs)
    candidate = sorted(pair.candidate_ns / pair.calls for pair in pairs)
    middle = len(pairs) // 2
    return reference[middle] / 1e6, candidate[middle] / 1e6


def create(
    name: ProtocolName,
    rng: random.Random,
    settings: TimingSettings | None = None,
    *,
    history: PlacementHistory | None = None,
    reference_ms: float = 1.0,
    window_s: float | None = None,
) -> TimingProtocol:
    """The protocol called `name`, with its own defaults without settings; `window_s` shortens the paper's window."""
    if name == "paper":
        return PaperProtocol(rng, window_s=window_s)
    if name == "reward":
        chosen = settings or TimingSettings(half_width=Reward.half_width, cap_s=8.0)
        return Reward(chosen, rng, history=history, reference_ms=reference_ms)
    return Sequential(settings or TimingSettings(), rng, history=history, reference_ms=reference_ms)
