"""The steps `time` and `confirm`: exclusive paired timing under a protocol, every timed call compared.

Invariants: only while the device's lock is held; the protocol decides order, calls, placements and the end; the claim
is bounded by the judge's spans.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from evaluator.bench import Bench, Draw
from evaluator.judgement.facts import Confirmation
from evaluator.timing import hygiene, protocols
from evaluator.timing.clock import Disturbances, calls_per_turn, pair_of
from evaluator.timing.plans import Stop, TimingResult
from evaluator.timing.statistics import Pair, checked, timer_facts

if TYPE_CHECKING:
    from evaluator.config import EvaluatorConfig
    from evaluator.device import Device
    from evaluator.flow import Gate


def settings(
    config: EvaluatorConfig, bench: Bench, device: Device, slots: int, reload: bool
) -> protocols.TimingSettings:
    """The protocol's numbers for this task and candidate."""
    timing = config.timing
    low, high = calls_per_turn(_call_ns(bench, device), slots)
    half_width = timing.reward_half_width if config.protocol == "reward" else timing.half_width
    return protocols.TimingSettings(
        half_width=half_width, confidence=timing.confidence, cap_s=timing.cap_s, calls_low=low, calls_high=high,
        reload=reload,
    )  # fmt: skip


def measure(bench: Bench, gate: Gate, device: Device, config: EvaluatorConfig, slots: int) -> None:
    """Runs the protocol to its end; leaves measurement and timer facts in the observed. Raises Ended."""
    result = _run(bench, gate, device, config, slots)
    observed = bench.observed
    observed.measurement = result.measurement
    observed.span_limited, observed.unstable = result.span_limited, result.unstable
    observed.news()
    gate.pass_or_end()


def _run(bench: Bench, gate: Gate, device: Device, config: EvaluatorConfig, slots: int) -> TimingResult:
    reload = bench.observed.parameters == "loaded" and not bench.each and "parameter_tracking" in bench.on
    protocol = protocols.create(
        config.protocol, random.Random(bench.secret()), settings(config, bench, device, slots, reload),
        reference_ms=bench.server.opened["call_ms"], window_s=config.timing.paper_window_s,
    )  # fmt: skip
    bench.server.ask({"op": "bases", "secret": bench.secret()})
    pairs: list[Pair] = []
    cores = 0 if device.runtime else len(device.arm_cores)
    placement, disturbances, begin = -1, Disturbances(), time.monotonic()
    readings: list[hygiene.Reading] = []
    while not isinstance(plan := protocol.next(time.monotonic() - begin), Stop):
        if plan.placement != placement:
            bench.place(slots)
            placement = plan.placement
            _settle(bench, slots if device.runtime else 1)  # as many results as ever live at once find their memory
        if plan.reload:
            bench.load_parameters(bench.secret())
            _settle(bench, 1)
        draws = [_timed(bench) for _ in range(min(plan.calls, slots))]
        reference, candidate = bench.pair(draws, reference_first=plan.order == "reference_first")
        spoiled = disturbances.of(reference, candidate)
        if bench.gauges is not None:
            readings.append(bench.gauges.read())
            spoiled = spoiled or hygiene.spoiled(readings[-1])
        pairs.append(checked(pair_of(reference, candidate, plan.placement, plan.order, cores=cores, spoiled=spoiled)))
        protocol.feed(pairs[-1])
        gate.pass_or_end()
    result = protocol.result(device.type)
    bench.observed.timers = timer_facts(pairs)
    if readings:
        measurement = result.measurement.model_copy(update={"clocks": hygiene.summary(readings)})
        return replace(result, measurement=measurement)
    return result


def _call_ns(bench: Bench, device: Device) -> float:
    """What a call of the slower arm takes, by the quickest turns of both.

    The last turn alone may have waited for a processor: the bursts would then be so short that their few inputs stay in
    the caches, and a candidate that lives on memory reads up to twice as fast.

    On an accelerator a turn of few calls is mostly the judge's own overhead, which both arms pay: there it is the
    reference's call, measured at its admission, and what the candidate's turn took more than the reference's.
    """
    reference_ns, candidate_ns = 1e9 * bench.reference.quickest_call_s, 1e9 * bench.candidate.quickest_call_s
    if not device.runtime:
        return max(reference_ns, candidate_ns)
    return 1e6 * float(bench.server.opened["call_ms"]) + max(0.0, candidate_ns - reference_ns)


def _timed(bench: Bench) -> Draw:
    """Inputs of a timed call: fresh ones for the defence `stale_result`, else the same for all calls."""
    return Draw(bench.secret() if "stale_result" in bench.on else 0, mixed=True)


def _settle(bench: Bench, calls: int) -> None:
    """An untimed, compared turn of each arm after memory or parameters have changed."""
    bench.pair([Draw.fresh(bench.rng) for _ in range(calls)], reference_first=True)


def confirm(bench: Bench, gate: Gate, device: Device, config: EvaluatorConfig, slots: int) -> None:
    """The same measurement again on fresh seeds and memory."""
    again = _run(bench, gate, device, config, slots).measurement
    bench.observed.confirmation = Confirmation(speedup=again.speedup, ci_low=again.ci_low, ci_high=again.ci_high)
    bench.observed.news()
    gate.pass_or_end()
