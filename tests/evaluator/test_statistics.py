"""Intervals: golden values by hand, coverage by seeded simulation, and what the audit and the two clocks catch."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluator.judgement.defences.timer_disagreement import (
    CALIBRATION_LOG,
    UNRESOLVED_LOG,
    alone_cap,
    disagrees,
    limited,
)
from evaluator.timing.quantiles import t_quantile
from evaluator.timing.statistics import (
    IMPOSSIBLE,
    Order,
    Pair,
    PlacementHistory,
    audit,
    between_processes_log,
    checked,
    estimate,
    placement_history,
    timer_facts,
    trimmed_mean,
    winsorised,
    with_alone,
)

MS = 1e6


def pair(log: float, placement: int = 0, order: Order = "reference_first", **more: float) -> Pair:
    """A pair of 1 ms of candidate against exp(log) ms of reference."""
    return Pair(placement, order, 4, MS * math.exp(log), MS, **more)  # type: ignore[arg-type]


def simulated(rng: random.Random, count: int, noise: float, placement_sd: float = 0.0, log: float = 0.0) -> list[Pair]:
    """Pairs of four on a placement; one in a hundred is 35 % off."""
    pairs = []
    for number in range(count):
        if number % 4 == 0:
            shift = rng.gauss(0, placement_sd)
        off = rng.choice((-0.3, 0.3)) if rng.random() < 0.01 else 0.0
        order: Order = "reference_first" if number % 2 else "candidate_first"
        pairs.append(pair(log + rng.gauss(0, noise) + shift + off, number // 4, order))
    return pairs


def test_trimmed_mean_by_hand() -> None:
    """1..9 and 100, one value cut at either end: mean of 2..9 = 5.5. Winsorised: 2, 2, 3..9, 9, mean 5.5, squares
    2 * (12.25 + 12.25 + 6.25 + 2.25 + 0.25) = 66.5, variance 66.5 / 9, error sqrt(66.5 / 9 * 9 / (8 * 7)) = 1.0897."""
    mean, error, degrees = trimmed_mean([100.0, *map(float, range(1, 10))])
    assert (mean, degrees) == (5.5, 7)
    assert error == pytest.approx(math.sqrt(66.5 / 56))


def test_winsorised_values_keep_their_order() -> None:
    values = [50.0, *map(float, range(9)), -50.0]
    assert winsorised(values) == [8.0, *map(float, range(9)), 0.0]


def test_an_interval_by_hand() -> None:
    """Four placements of constant logs 0, 0.01, 0.02, 0.03: the mean is 0.015; the variance between placements is
    (0.015^2 + 0.005^2) * 2 / 3 = 1.667e-4 (winsorising pulls nothing in that is not doubled), over 4 is 4.17e-5, which
    exceeds the pairs' own; t at 99 % and 3 degrees is 4.5407."""
    pairs = [pair(0.01 * place, place) for place in range(4) for _ in range(2)]
    result = estimate(pairs)
    assert result.mean_log == pytest.approx(0.015)
    assert result.degrees == 3
    assert result.half_width_log == pytest.approx(4.5407 * math.sqrt(5e-4 / 3 / 4), rel=1e-4)
    assert (result.pairs, result.placements) == (8, 4)


def test_what_a_pairs_order_adds_widens_no_interval_and_moves_no_speedup() -> None:
    """The arm that comes first takes 14 % less in every pair, whichever it is."""
    rng = random.Random(2)
    plain = simulated(rng, 24, 0.003, log=0.3)
    moved = [
        replace(one, reference_ns=one.reference_ns * (0.86 if one.order == "reference_first" else 1 / 0.86))
        for one in plain
    ]
    found, without = estimate(moved), estimate(plain)
    assert found.mean_log == pytest.approx(without.mean_log, abs=1e-3)
    assert found.half_width_log == pytest.approx(without.half_width_log, rel=0.2)
    assert found.order_effect_log == pytest.approx(2 * math.log(0.86), abs=0.01)


def test_spoiled_pairs_do_not_count() -> None:
    pairs = [pair(0.1, n // 4) for n in range(20)]
    assert estimate([*pairs, replace(pair(5.0), spoiled="throttled")]) == estimate(pairs)


def test_impossible_times_are_spoiled_before_any_arithmetic() -> None:
    for time in (0.0, -1.0, math.inf, math.nan):
        assert checked(replace(pair(0.1), candidate_ns=time)).spoiled == IMPOSSIBLE
    assert checked(pair(0.1)).spoiled == ""


@given(st.lists(st.floats(-1, 1), min_size=4, max_size=60), st.floats(-1, 1))
def test_a_ratio_and_its_inverse_are_treated_alike(logs: list[float], shift: float) -> None:
    forward = estimate([pair(log + shift, n // 4) for n, log in enumerate(logs)])
    back = estimate([pair(-log - shift, n // 4) for n, log in enumerate(logs)])
    assert forward.mean_log == pytest.approx(-back.mean_log, abs=1e-9)
    assert forward.half_width_log == pytest.approx(back.half_width_log, abs=1e-9)


@pytest.mark.parametrize(("noise", "placement_sd"), [(0.005, 0.0), (0.01, 0.005), (0.02, 0.0), (0.02, 0.01)])
def test_the_interval_covers_the_truth_under_looks_that_grow_by_half(noise: float, placement_sd: float) -> None:
    """300 runs with looks at 20, 30, 46, 70, ... pairs until the half-width is 1 %: nominal 98 %.

    With a true coverage of 98 % fewer than 285 of 300 happen once in 2,000 runs.
    """
    rng = random.Random(17)
    covered = 0
    for _ in range(300):
        pairs = simulated(rng, 600, noise, placement_sd)
        look = 20
        while look <= len(pairs):
            result = estimate(pairs[:look])
            if result.half_width_log <= 0.01:
                break
            look = math.ceil(1.5 * look / 2) * 2
        covered += abs(result.mean_log) <= result.half_width_log
    assert covered >= 285


def test_history_replaces_placements_and_keeps_coverage() -> None:
    """Three placements of four pairs, their standard deviation known from history."""
    rng = random.Random(3)
    history = PlacementHistory(0.005**2, 100)
    covered = sum(
        abs((result := estimate(simulated(rng, 12, 0.01, 0.005), history=history)).mean_log) <= result.half_width_log
        for _ in range(500)
    )
    assert covered >= 478


def test_without_placements_in_the_interval_it_would_be_too_narrow() -> None:
    """The same draws with a history that denies any placement effect: the coverage test above can fail."""
    rng = random.Random(17)
    covered = 0
    for _ in range(300):
        result = estimate(simulated(rng, 24, 0.005, 0.01), history=PlacementHistory(0.0, 1000))
        covered += abs(result.mean_log) <= result.half_width_log
    assert covered < 285


def test_pooled_history_finds_the_placement_variance() -> None:
    rng = random.Random(5)
    results = [estimate(simulated(rng, 40, 0.01, 0.02)) for _ in range(60)]
    history = placement_history([(result.placement_sd_log, result.placements) for result in results])
    assert history is not None
    assert history.degrees == 60 * 9
    assert math.sqrt(history.variance_log) == pytest.approx(0.02, rel=0.2)
    assert placement_history([(0.0, 1), (0.5, 1)]) is None
    assert placement_history([(0.01, 2), (0.03, 4)]) == PlacementHistory(pytest.approx(0.0007), 4)


def test_the_order_effect_is_reported_and_cancels() -> None:
    pairs = [
        pair(0.1 + (0.02 if n % 2 else -0.02), n // 4, "reference_first" if n % 2 else "candidate_first")
        for n in range(40)
    ]
    result = estimate(pairs)
    assert result.order_effect_log == pytest.approx(0.04)
    assert result.mean_log == pytest.approx(0.1)


def test_the_audit_agrees_with_honest_noise() -> None:
    rng = random.Random(2)
    agreed = 0
    for _ in range(100):
        pairs = simulated(rng, 40, 0.02, log=0.5)
        agreed += audit(pairs, estimate(pairs)).agrees
    assert agreed >= 95


def test_the_audit_scores_the_lower_value_when_dropped_calls_are_slow() -> None:
    """The counted calls claim 2x, yet the first call of each burst takes ten times as long as all of them."""
    rng = random.Random(4)
    pairs = [
        replace(one, reference_burst_ns=one.reference_ns * 1.25, candidate_burst_ns=one.candidate_ns * 11)
        for one in simulated(rng, 40, 0.01, log=math.log(2))
    ]
    result = estimate(pairs)
    found = audit(pairs, result)
    assert not found.agrees
    assert found.scored_log == pytest.approx(math.log(2 * 1.25 / 11), abs=0.02)
    assert result.mean_log == pytest.approx(math.log(2), abs=0.01)


def test_the_audit_scores_the_lower_value_when_trimmed_turns_are_slow() -> None:
    """One turn in eleven takes a hundred times as long: trimmed away in the estimate, not in the total."""
    pairs = [pair(-4.6 if n % 11 == 5 else 0.7 + 0.001 * (n % 3), n // 4) for n in range(44)]
    pairs = [replace(one, candidate_ns=MS, reference_ns=MS * math.exp(one.log_ratio)) for one in pairs]
    found = audit(pairs, estimate(pairs))
    assert found.untrimmed_log < 0.3
    assert found.scored_log <= estimate(pairs).mean_log


def spans(
    rng: random.Random, claimed: float, true: float, *, overhead: float = 0.1, jitter: float = 0.01, count: int = 24
) -> list[Pair]:
    """Reference 8 ms; the candidate claims and takes what is given, in ms a turn."""
    return [
        Pair(
            n // 4, "reference_first", 4, 8 * MS, claimed * MS, 8 * MS, claimed * MS,
            (8 + overhead + rng.gauss(0, jitter)) * MS, (true + overhead + rng.gauss(0, jitter)) * MS,
        )
        for n in range(count)
    ]  # fmt: skip


def test_two_clocks_agree_on_an_honest_candidate() -> None:
    facts = timer_facts(spans(random.Random(1), 4, 4))
    assert facts.native_log == pytest.approx(math.log(2))
    assert facts.span_log == pytest.approx(math.log(2), abs=0.01)
    assert not disagrees(facts)
    assert limited(facts.native_log, facts.span_log, facts.span_error_log) == (facts.native_log, False)


def test_a_forged_clock_disagrees() -> None:
    facts = timer_facts(spans(random.Random(1), 1, 8))
    assert facts.native_log == pytest.approx(math.log(8))
    assert facts.span_log == pytest.approx(0.0, abs=0.02)
    assert disagrees(facts)


def test_a_slightly_forged_clock_is_not_paid() -> None:
    """3 % more than true is within what calibration explains, and is cut to 2 %."""
    facts = timer_facts(spans(random.Random(1), 4 / 1.03, 4))
    paid, label = limited(facts.native_log, facts.span_log, facts.span_error_log)
    assert paid < facts.native_log
    assert paid == pytest.approx(math.log(2 * 1.02), abs=0.01)
    assert label


def test_scatter_of_its_own_does_not_widen_the_error_at_will() -> None:
    rng = random.Random(7)
    noisy = [replace(one, candidate_span_ns=one.candidate_span_ns + rng.uniform(0, 8) * MS) for one in spans(rng, 1, 4)]
    facts = timer_facts(noisy)
    assert disagrees(facts)


def test_a_busy_machine_is_not_taken_for_forgery() -> None:
    """Overheads of 2 ms, of 12 where a turn had to wait, on either arm in one turn of three; the claim is true."""
    wrong = 0
    for seed in range(200):
        rng = random.Random(seed)
        pairs = [
            Pair(
                n // 4, "reference_first", 2, 8 * MS, 8.2 * MS, 8 * MS, 8.2 * MS,
                (10 + (10 if rng.random() < 0.33 else rng.random())) * MS,
                (10.2 + (10 if rng.random() < 0.33 else rng.random())) * MS,
            )
            for n in range(24)
        ]  # fmt: skip
        facts = timer_facts(pairs)
        wrong += disagrees(facts)
    assert wrong <= 2


def test_a_span_that_cannot_tell_resolves_nothing() -> None:
    """A candidate of 20 us beside overheads of 5 ms that scatter by 1 ms."""
    facts = timer_facts(spans(random.Random(1), 0.02, 0.02, overhead=5, jitter=1))
    assert facts.span_error_log == UNRESOLVED_LOG or facts.span_error_log > 1
    assert not disagrees(facts)
    assert limited(facts.native_log, facts.span_log, facts.span_error_log)[1]


def test_missing_native_times_are_counted() -> None:
    pairs = [checked(replace(pair(0.1), candidate_ns=0.0)), pair(0.1), pair(0.1)]
    assert timer_facts(pairs).missing_turns == 1


def test_quantiles_are_those_of_the_degrees_used() -> None:
    pairs = [pair(0.01 * (n % 5), n) for n in range(20)]
    result = estimate(pairs)
    assert result.half_width_log > 0
    assert t_quantile(0.99, result.degrees) > t_quantile(0.99, 100)


def test_delivery_that_grows_with_the_calls_does_not_hide_a_small_lie() -> None:
    """2 ms a call, 1 ms of it delivery; the candidate's clock leaves out a third of what it shows."""
    rng = random.Random(3)
    pairs = []
    for number in range(20):
        calls = rng.randint(2, 12)
        burst, delivery = 1e6 * calls, 5e5 + 1e6 * calls
        spans = [burst + delivery + rng.gauss(0, 2e4) for _ in range(2)]
        pairs.append(
            Pair(number // 4, "reference_first", calls, burst, burst / 1.5, burst, burst / 1.5, *spans)
        )  # fmt: skip
    seen = timer_facts(pairs)
    assert seen.span_error_log < 0.05
    assert abs(seen.span_log) < 0.02
    assert disagrees(seen)


def test_what_the_span_cannot_tell_pays_no_gain() -> None:
    """A worker that was taken over spares the turn's overhead, and hides its work in what it spared."""
    hidden = [replace(one, candidate_ns=0.01 * MS, candidate_burst_ns=0.01 * MS, candidate_span_ns=4 * MS)
              for one in spans(random.Random(1), 4, 4, overhead=5)]  # fmt: skip
    facts = timer_facts(hidden)
    assert facts.native_log > 4
    assert limited(facts.native_log, facts.span_log, facts.span_error_log) == (CALIBRATION_LOG, True)
    assert limited(-0.3, -0.3, UNRESOLVED_LOG)[0] == -0.3


def test_single_calls_cap_what_only_shows_in_company() -> None:
    facts = with_alone(timer_facts(spans(random.Random(1), 1, 1)), spans(random.Random(2), 1, 8))
    assert facts.alone_log == pytest.approx(0.0, abs=0.02)
    assert alone_cap(facts, math.log(8)) == pytest.approx(CALIBRATION_LOG, abs=0.03)


@pytest.mark.parametrize("alone", [spans(random.Random(2), 4, 4)[:3], spans(random.Random(2), 0.02, 0.02, overhead=5)])
def test_single_calls_that_show_nothing_cap_nothing(alone: list[Pair]) -> None:
    facts = with_alone(timer_facts(spans(random.Random(1), 4, 4)), alone)
    assert alone_cap(facts, math.log(2)) == math.inf


def test_single_calls_that_agree_cap_nothing() -> None:
    """Also where a call alone gains a little less, since nothing lies in the caches for it."""
    facts = with_alone(timer_facts(spans(random.Random(1), 4, 4)), spans(random.Random(2), 4.2, 4.2))
    assert alone_cap(facts, math.log(2)) == math.inf


def test_launched_ahead_overheads_that_differ_by_the_processors_speed_are_no_lie() -> None:
    """Turns of 64 calls of 6 us beside 250 us of overhead each, 2 % longer on one arm than on the other."""
    rng = random.Random(5)
    pairs = [
        Pair(
            n // 4, "reference_first", 64, 0.4 * MS, 0.4 * MS, 0.4 * MS, 0.4 * MS, (16.4 + rng.gauss(0, 0.05)) * MS,
            (16.4 * 1.02 + rng.gauss(0, 0.05)) * MS, lead_ns=130_000,
        )
        for n in range(20)
    ]  # fmt: skip
    assert not disagrees(timer_facts(pairs))
    assert disagrees(timer_facts([replace(one, lead_ns=0) for one in pairs]))


def test_launched_ahead_a_gain_that_the_span_cannot_tell_is_paid_with_a_label() -> None:
    assert limited(1.0, 1.0, UNRESOLVED_LOG, launched_ahead=True) == (1.0, True)
    assert limited(1.0, 1.0, 0.1, launched_ahead=True) == (1.0, False)
    assert limited(1.0, 0.9, 0.3, launched_ahead=True) == (1.0, True)


def test_what_differs_between_processes_counts_by_a_devices_clock_alone() -> None:
    """300 ns of calls of 6 us and of 300 us; of four calls a turn."""
    for call_ns, expected in ((6e3, 0.0488), (3e5, 0.001)):
        pairs = [Pair(0, "reference_first", 4, 8 * call_ns, 4 * call_ns, lead_ns=130_000)] * 3
        assert between_processes_log(pairs) == pytest.approx(expected, rel=0.01)
    assert between_processes_log([replace(pairs[0], lead_ns=0)]) == 0.0
