"""Protocols as state machines: order, looks, stopping, coverage, and the paper's rules."""

from __future__ import annotations

import math
import random

import pytest
from pydantic import ValidationError

from evaluator.timing.paper import (
    BUCKETS,
    MAX_BUCKET_VARIANCE,
    WINDOW_S,
    PaperProtocol,
    bucket_means,
    conservative,
    needs_second_device,
)
from evaluator.timing.plans import Plan, Stop, TimingResult
from evaluator.timing.protocols import (
    PAIRS_PER_PLACEMENT,
    Reward,
    Sequential,
    TimingProtocol,
    TimingSettings,
    create,
)
from evaluator.timing.statistics import Pair, PlacementHistory, placement_history

MS = 1e6


class Machine:
    """A simulated device: lognormal noise, a placement effect, and a clock of its own."""

    def __init__(self, seed: int, log: float, noise: float, placement_sd: float = 0.0, call_ms: float = 1.0) -> None:
        self.rng = random.Random(seed)
        self.elapsed_s = 0.0
        self._log, self._noise, self._placement_sd, self._call_ms = log, noise, placement_sd, call_ms
        self._shifts: dict[int, float] = {}

    def run(self, plan: Plan, spoiled: str = "") -> Pair:
        counted = plan.calls - 1
        shift = self._shifts.setdefault(plan.placement, self.rng.gauss(0, self._placement_sd))
        reference = counted * self._call_ms * math.exp(self.rng.gauss(0, self._noise)) * MS
        candidate = counted * self._call_ms * math.exp(self.rng.gauss(0, self._noise) - self._log - shift) * MS
        self.elapsed_s += (reference + candidate) / 1e9
        return Pair(plan.placement, plan.order, counted, reference, candidate, spoiled=spoiled)


def drive(protocol: TimingProtocol, machine: Machine, most: int = 5000) -> tuple[TimingResult, list[Plan]]:
    plans: list[Plan] = []
    for _ in range(most):
        plan = protocol.next(machine.elapsed_s)
        if isinstance(plan, Stop):
            return protocol.result(), plans
        plans.append(plan)
        protocol.feed(machine.run(plan))
    raise AssertionError("the protocol does not stop")


def sequential(seed: int = 0, **settings: object) -> Sequential:
    return Sequential(TimingSettings(**settings), random.Random(seed))  # type: ignore[arg-type]


def test_blocks_are_abba_or_baab_and_both_occur() -> None:
    protocol = sequential(half_width=0.0001, max_pairs=80)
    _, plans = drive(protocol, Machine(1, 0.2, 0.02))
    blocks = [(plans[n].order, plans[n + 1].order) for n in range(0, len(plans) - 1, 2)]
    assert all(first != second for first, second in blocks)
    assert len({first for first, _ in blocks}) == 2


def test_placements_change_every_four_pairs() -> None:
    _, plans = drive(sequential(max_pairs=20), Machine(1, 0.2, 0.02))
    assert [plan.placement for plan in plans] == [n // PAIRS_PER_PLACEMENT for n in range(20)]


def test_calls_vary_within_their_bounds_and_parameters_change_once() -> None:
    protocol = sequential(half_width=0.0001, max_pairs=60, calls_low=3, calls_high=6)
    _, plans = drive(protocol, Machine(1, 0.2, 0.02))
    assert {plan.calls for plan in plans} == {3, 4, 5, 6}
    assert sum(plan.reload for plan in plans) == 1
    assert not plans[0].reload


def test_no_reload_where_it_is_off() -> None:
    _, plans = drive(sequential(reload=False, max_pairs=40), Machine(1, 0.2, 0.02))
    assert not any(plan.reload for plan in plans)


def test_a_quiet_candidate_stops_at_the_first_look() -> None:
    result, plans = drive(sequential(), Machine(1, math.log(2), 0.002))
    assert len(plans) == 20
    assert result.measurement.stopped == "half_width"
    assert result.measurement.placements == 5
    assert result.measurement.speedup == pytest.approx(2, rel=0.01)
    assert result.measurement.ci_low < 2 < result.measurement.ci_high


def test_a_noisy_candidate_needs_more_looks() -> None:
    result, plans = drive(sequential(), Machine(1, math.log(2), 0.02))
    assert len(plans) in (30, 46, 70, 106, 160, 240)
    assert result.measurement.stopped == "half_width"
    assert result.measurement.ci_high / result.measurement.speedup <= 1.0101


@pytest.mark.parametrize(("call_ms", "degrees", "pairs", "placements"), [
    (1, 50, 12, 3), (60, 50, 6, 3), (1, 9, 20, 5), (60, 9, 10, 5),
])  # fmt: skip
def test_enough_history_makes_three_placements_enough(
    call_ms: float, degrees: int, pairs: int, placements: int
) -> None:
    history = PlacementHistory(1e-6, degrees)
    protocol = Sequential(TimingSettings(), random.Random(0), history=history, reference_ms=call_ms)
    result, _ = drive(protocol, Machine(1, math.log(2), 0.001, call_ms=call_ms))
    assert (result.measurement.pairs, result.measurement.placements) == (pairs, placements)


@pytest.mark.parametrize(("noise", "placement_sd"), [(0.005, 0.01), (0.01, 0.0), (0.02, 0.01)])
def test_looks_from_three_placements_on_keep_the_coverage(noise: float, placement_sd: float) -> None:
    """200 runs to a half-width of 3 %, their placement variance known from three controls; nominal 98 %."""
    covered = 0
    for seed in range(200):
        machine = Machine(seed, 0.0, noise, placement_sd)
        runs = [drive(sequential(n), Machine(1000 * seed + n, 0.0, noise, placement_sd))[0] for n in range(3)]
        history = placement_history((run.placement_sd_log, run.measurement.placements) for run in runs)
        protocol = create("reward", random.Random(seed), history=history)
        result, _ = drive(protocol, machine)
        covered += result.measurement.ci_low <= 1 <= result.measurement.ci_high
    assert covered >= 190


def test_a_slow_candidate_is_futile() -> None:
    result, plans = drive(sequential(), Machine(1, math.log(0.7), 0.05))
    assert result.measurement.stopped == "futility"
    assert result.measurement.ci_high < 0.95
    assert len(plans) == 20


def test_reward_gives_up_early() -> None:
    protocol = create("reward", random.Random(0))
    assert isinstance(protocol, Reward)
    result, plans = drive(protocol, Machine(1, math.log(0.5), 0.03))
    assert result.measurement.stopped == "futility"
    assert len(plans) == 8


def test_reward_does_not_give_up_what_might_be_fast() -> None:
    for seed in range(20):
        result, _ = drive(create("reward", random.Random(seed)), Machine(seed, math.log(1.05), 0.05))
        assert result.measurement.stopped != "futility"


def test_the_time_cap_ends_it() -> None:
    result, _ = drive(sequential(cap_s=0.1), Machine(1, 0.0, 0.2))
    assert result.measurement.stopped == "time_cap"
    assert result.measurement.pairs >= 12


def test_the_time_cap_waits_for_a_few_pairs_and_not_for_ever() -> None:
    """Pairs of a second and a cap of two: twelve pairs would take twelve seconds, six are allowed."""
    protocol, machine = sequential(cap_s=2.0), Machine(1, 0.0, 0.01)
    elapsed_s = 0.0
    while not isinstance(plan := protocol.next(elapsed_s), Stop):
        protocol.feed(machine.run(plan))
        elapsed_s += 1.0
    assert (protocol.good, protocol.stopped) == (6, "time_cap")
    measured = protocol.result().measurement
    assert 0.8 < measured.ci_low < 1 < measured.ci_high < 1.25


def test_the_pair_cap_ends_it() -> None:
    result, plans = drive(sequential(half_width=0.0001, max_pairs=50), Machine(1, 0.0, 0.2))
    assert result.measurement.stopped == "pairs"
    assert len(plans) == 50


def test_a_spoiled_pair_is_asked_for_again() -> None:
    protocol, machine = sequential(), Machine(1, 0.3, 0.002)
    first = protocol.next(0)
    assert isinstance(first, Plan)
    protocol.feed(machine.run(first, spoiled="a stranger on the device"))
    again = protocol.next(0)
    assert isinstance(again, Plan)
    assert (again.pair, again.placement, again.order) == (first.pair, first.placement, first.order)
    result, _ = drive(protocol, machine)
    assert (result.measurement.pairs, result.spoiled_pairs) == (20, 1)


def test_equal_arms_cover_one() -> None:
    """A/A: 200 runs against a machine with 1 % noise and 0.5 % placement effect; nominal 98 %, at least 190."""
    covered = 0
    for seed in range(200):
        result, _ = drive(sequential(seed), Machine(seed, 0.0, 0.01, 0.005))
        covered += result.measurement.ci_low <= 1 <= result.measurement.ci_high
    assert covered >= 190


def test_bursts_double_while_the_span_cannot_resolve_the_gain() -> None:
    """Overheads of 5 ms that scatter by 0.5 ms beside bursts of a tenth of a millisecond a call."""
    rng = random.Random(3)
    protocol = sequential(calls_low=4, calls_high=4, calls_most=64)
    seen, elapsed_s = [], 0.0
    while not isinstance(plan := protocol.next(elapsed_s), Stop):
        seen.append(plan.calls)
        burst, fast = plan.calls * 0.2 * MS, plan.calls * 0.1 * MS
        protocol.feed(
            Pair(
                plan.placement, plan.order, plan.calls - 1, burst, fast, burst, fast,
                burst + rng.gauss(5, 0.5) * MS, fast + rng.gauss(5, 0.5) * MS,
            )
        )  # fmt: skip
        elapsed_s += 0.01
    assert max(seen) in (8, 16, 32, 64)
    assert seen == sorted(seen)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValidationError):
        TimingSettings(halfwidth=0.01)  # type: ignore[call-arg]


def test_papers_rounding_goes_towards_one() -> None:
    """The paper's own examples, and values that are already round."""
    assert [conservative(x) for x in (1.118, 0.992, 1.0, 2.0, 0.5, 1.11)] == [1.11, 1.0, 1.0, 2.0, 0.5, 1.11]


def test_papers_buckets_are_consecutive_and_nearly_equal() -> None:
    """Sixteen scores in seven runs of 2, 2, 2, 3, 2, 2, 3."""
    means = bucket_means([float(n) for n in range(16)])
    assert means == [0.5, 2.5, 4.5, 7.0, 9.5, 11.5, 14.0]
    with pytest.raises(ValueError, match="do not fill"):
        bucket_means([1.0] * 6)


def test_papers_score_is_the_median_of_bucket_means() -> None:
    """Seven rounds of 1, 2, 3, 4, 5, 6, 7 times: the median bucket is 4; the variance of 4.67 refuses the whole."""
    protocol = PaperProtocol(random.Random(0), window_s=1.0)
    for n in range(1, 8):
        protocol.feed(Pair(0, "reference_first", 1, n * MS, MS))
    assert isinstance(protocol.next(1.0), Stop)
    result = protocol.result()
    assert result.measurement.speedup == 4.0
    assert "0.005" in result.unstable
    assert (result.measurement.pairs, result.measurement.stopped) == (7, "window")


def test_papers_window_and_order() -> None:
    protocol = create("paper", random.Random(1), window_s=2.0)
    result, plans = drive(protocol, Machine(1, math.log(1.5), 0.02))
    assert result.unstable == ""
    assert result.measurement.speedup in (1.48, 1.49, 1.5, 1.51)
    assert result.measurement.ci_low <= result.measurement.speedup <= result.measurement.ci_high
    first = sum(plan.order == "reference_first" for plan in plans)
    assert 0.4 < first / len(plans) < 0.6
    assert WINDOW_S == 1800
    assert (BUCKETS, MAX_BUCKET_VARIANCE) == (7, 0.005)
    assert create("paper", random.Random(1)).window_s == WINDOW_S  # type: ignore[attr-defined]


def test_papers_second_device_rule() -> None:
    assert needs_second_device(3.01, None)
    assert needs_second_device(2.5, 1.2)
    assert not needs_second_device(2.5, 2.0)
