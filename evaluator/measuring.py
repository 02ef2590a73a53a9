"""The steps `time` and `confirm`: exclusive paired timing under a protocol, every timed call compared.

Invariants: only while the device's lock is held; the protocol decides order, calls, placements and the end; the claim
is bounded by the judge's spans.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evaluator.bench import Bench, Draw
from evaluator.judgement.defences.timer_disagreement import CALIBRATION_LOG, alone_cap
from evaluator.judgement.facts import Confirmation
from evaluator.timing import hygiene, protocols
from evaluator.timing.clock import Disturbances, calls_per_turn, pair_of
from evaluator.timing.plans import Stop, TimingResult
from evaluator.timing.statistics import Order, Pair, checked

if TYPE_CHECKING:
    from evaluator.config import EvaluatorConfig
    from evaluator.device import Device
    from evaluator.duel import Duel
    from evaluator.flow import Gate

ALONE_PAIRS = 14
"""Pairs of single calls behind a timing that shows a gain."""


def settings(config: EvaluatorConfig, bench: Bench | Duel, slots: int, reload: bool) -> protocols.TimingSettings:
    """The protocol's numbers for this task and candidate."""
    timing = config.timing
    low, high = calls_per_turn(bench.call_ns(), slots)
    half_width = timing.reward_half_width if config.protocol == "reward" else timing.half_width
    return protocols.TimingSettings(
        half_width=half_width, confidence=timing.confidence, cap_s=timing.cap_s, calls_low=low, calls_high=high,
        reload=reload,
    )  # fmt: skip


def measure(bench: Bench | Duel, gate: Gate, device: Device, config: EvaluatorConfig, slots: int) -> None:
    """Runs the protocol to its end; leaves measurement and timer facts in the observed. Raises Ended."""
    result = _run(bench, gate, device, config, slots)
    observed = bench.observed
    observed.measurement = result.measurement
    observed.span_limited, observed.unstable = result.span_limited, result.unstable
    observed.placement_sd_log = result.placement_sd_log
    observed.news()
    gate.pass_or_end()


def _run(bench: Bench | Duel, gate: Gate, device: Device, config: EvaluatorConfig, slots: int) -> TimingResult:
    numbers = settings(config, bench, slots, bench.reloads)
    most = min(slots, numbers.calls_high)
    protocol = protocols.create(
        config.protocol, random.Random(bench.secret()), numbers, history=bench.history,
        reference_ms=bench.server.opened["call_ms"], window_s=config.timing.paper_window_s,
    )  # fmt: skip
    pairs: list[Pair] = []
    cores = 0 if device.runtime else len(device.arm_cores)
    placement, disturbances, begin = -1, Disturbances(), time.monotonic()
    readings: list[hygiene.Reading] = []
    while not isinstance(plan := protocol.next(time.monotonic() - begin), Stop):
        if plan.placement != placement:
            bench.place(slots)
            placement = plan.placement
            _settle(bench, most)
        if plan.reload:
            bench.load_parameters(bench.secret())
            _settle(bench, 1)
        draws = [_timed(bench) for _ in range(min(plan.calls, slots))]
        reference, candidate = bench.pair(draws, reference_first=plan.order == "reference_first")
        spoiled = "" if bench.lead_ns else disturbances.of(reference, candidate)
        if bench.gauges is not None:
            readings.append(bench.gauges.read())
            spoiled = spoiled or hygiene.spoiled(readings[-1])
        pairs.append(checked(pair_of(
            reference, candidate, plan.placement, plan.order, cores=cores, lead_ns=bench.lead_ns, spoiled=spoiled
        )))  # fmt: skip
        bench.observed.turns.add(bench.observed.step, pairs[-1], readings[-1] if readings else {})
        protocol.feed(pairs[-1])
        gate.pass_or_end()
    result = protocol.result(device.type)
    claimed_log = math.log(result.measurement.speedup)
    gains = claimed_log > CALIBRATION_LOG and cores > 0
    bench.timed(pairs, [_alone(bench, placement, cores) for _ in range(ALONE_PAIRS)] if gains else [])
    gate.pass_or_end()
    result = capped(result, alone_cap(bench.observed.timers, claimed_log))
    update: dict[str, Any] = {"definition": "device" if bench.lead_ns else "latency"}
    if readings:
        update["clocks"] = hygiene.summary(readings)
    return replace(result, measurement=result.measurement.model_copy(update=update))


def _alone(bench: Bench | Duel, placement: int, cores: int) -> Pair:
    """A pair of one call each: while it runs, no later call's inputs are there to be worked on in advance."""
    reference_first = bench.rng.random() < 0.5
    reference, candidate = bench.pair([_timed(bench)], reference_first=reference_first)
    order: Order = "reference_first" if reference_first else "candidate_first"
    return checked(pair_of(reference, candidate, placement, order, cores=cores))


def capped(result: TimingResult, cap_log: float) -> TimingResult:
    """The result, its speedup and interval lowered to the cap where they are above it."""
    found = result.measurement
    over = math.log(found.speedup) - cap_log
    if over <= 0:
        return result
    names = ("speedup", "ci_low", "ci_high")
    lowered = found.model_copy(update={name: getattr(found, name) * math.exp(-over) for name in names})
    return replace(result, measurement=lowered, span_limited=True)


def _timed(bench: Bench | Duel) -> Draw:
    """Inputs of a timed call: fresh ones for the defence `stale_result`, else the same for all calls."""
    return Draw(bench.secret() if "stale_result" in bench.on else 0, timed=True)


def _settle(bench: Bench | Duel, calls: int) -> None:
    """An untimed, compared turn of each arm after memory or parameters have changed.

    After a change of memory it has as many calls as any turn, so that all results that ever live at once have been
    there; a random arm is first, so that neither always gets the pages that the other gave back.
    """
    draws = [Draw.fresh(bench.rng) for _ in range(calls)]
    bench.pair(draws, reference_first=bench.rng.random() < 0.5)


def confirm(bench: Bench | Duel, gate: Gate, device: Device, config: EvaluatorConfig, slots: int) -> None:
    """The same measurement again on fresh seeds and memory."""
    again = _run(bench, gate, device, config, slots).measurement
    bench.observed.confirmation = Confirmation(speedup=again.speedup, ci_low=again.ci_low, ci_high=again.ci_high)
    bench.observed.news()
    gate.pass_or_end()
