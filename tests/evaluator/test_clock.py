"""The arms' clocks: what a turn says, what is discarded, how long a burst is."""

from __future__ import annotations

import math

import pytest

from evaluator.timing.clock import DISTURBED, MAX_SLOTS, ArmTurn, Disturbances, calls_per_turn, pair_of, slots_for


def turn(stamps: tuple[int, ...], span: int, ran: int = 0, waited: int = 0) -> ArmTurn:
    return ArmTurn(stamps, span, ran, waited)


def test_the_first_call_is_dropped_from_the_count_and_kept_in_the_burst() -> None:
    """Stamps 0, 10, 13, 16: burst 16, counted 6; a single call counts as a whole."""
    assert (turn((0, 10, 13, 16), 20).burst_ns, turn((0, 10, 13, 16), 20).counted_ns) == (16, 6)
    assert turn((5, 9), 9).counted_ns == 4


@pytest.mark.parametrize(("stamps", "span"), [((0, 5, 5), 9), ((0, 5, 4), 9), ((0, 5, 12), 11)])
def test_readings_that_cannot_be_make_the_pair_impossible(stamps: tuple[int, ...], span: int) -> None:
    pair = pair_of(turn((0, 5, 10), 12), turn(stamps, span), 0, "reference_first", spoiled=DISTURBED)
    assert not pair.possible
    assert pair.spoiled == ""  # an impossible time must not hide behind a disturbed one


def test_a_burst_that_was_interrupted_spoils_its_pair() -> None:
    """Both arms run 2 ns a call beside their bursts; the last candidate's 100 ns burst ran for 60 and waited 40."""
    judge = Disturbances()
    calm = turn((0, 50, 100), 110, ran=104, waited=0)
    assert [judge.of(calm, calm) for _ in range(5)] == [""] * 5
    assert judge.of(calm, turn((0, 50, 100), 150, ran=64, waited=40)) == DISTURBED


def test_waiting_before_the_burst_or_for_its_own_threads_spoils_nothing() -> None:
    judge = Disturbances()
    calm = turn((0, 50, 100), 110, ran=104, waited=0)
    late = turn((0, 50, 100), 400, ran=104, waited=290)
    crowded = turn((0, 50, 100), 110, ran=104, waited=100)
    sleeping = turn((0, 50, 100), 110, ran=14, waited=0)
    assert [judge.of(calm, other) for other in (late, crowded, sleeping)] == [""] * 3


def test_not_every_pair_is_discarded_for_ever() -> None:
    judge = Disturbances()
    calm, hit = turn((0, 50, 100), 110, ran=104), turn((0, 50, 100), 150, ran=64, waited=40)
    found = [bool(judge.of(calm, hit)) for _ in range(200)]
    assert sum(found) <= 20 + 100
    assert found[:20] == [True] * 20


def test_calls_of_a_turn_aim_at_8_ms_and_are_at_least_two() -> None:
    """1 ms: 6 to 12 calls; 20 ms: 2; 1 us: all 16 slots."""
    assert calls_per_turn(1e6, 16) == (6, 12)
    assert calls_per_turn(20e6, 16) == (2, 2)
    assert calls_per_turn(1e3, MAX_SLOTS) == (12, 16)


def test_slots_follow_from_free_memory() -> None:
    """1 GiB a call, five copies counted as three: two calls need 6 GiB in a quarter of what is free."""
    assert slots_for(1 << 30, 2, 23 << 30) == 0
    assert slots_for(1 << 30, 2, 24 << 30) == 2
    assert slots_for(1 << 10, 2, 8 << 30) == MAX_SLOTS
    assert slots_for(1 << 10, 64, 8 << 30) == 4


def test_a_pairs_times_are_the_turns() -> None:
    pair = pair_of(turn((0, 4, 10, 16), 30, 29), turn((0, 2, 5, 8), 20, 15), 3, "candidate_first")
    assert (pair.reference_ns, pair.candidate_ns, pair.calls, pair.placement) == (12, 6, 2, 3)
    assert pair.log_ratio == pytest.approx(math.log(2))
    assert (pair.reference_span_ns, pair.candidate_span_ns) == (29, 15)


def test_the_judges_clock_holds_all_work_and_nothing_else() -> None:
    """Span 100, of which 60 ran and 30 waited: 60 on one core; on two cores 100 less what others took, 30.

    Work in threads that wait for each other is never taken off: with 95 run in the span only 5 can be others'.
    """
    assert turn((0, 50), 100, ran=60, waited=30).shown_ns(1) == 60
    assert turn((0, 50), 100, ran=60, waited=30).shown_ns(2) == 70
    assert turn((0, 50), 100, ran=95, waited=90).shown_ns(2) == 95
    assert turn((0, 50), 100, ran=150, waited=90).shown_ns(2) == 100


def test_an_accelerator_arm_is_shown_its_whole_span() -> None:
    """5 ms of processor time and 9 ms of waiting threads shorten nothing of a span of 20 ms."""
    turn = ArmTurn((0, 10, 20), 20_000_000, 5_000_000, 9_000_000)
    assert turn.shown_ns(cores=0) == 20e6
    assert turn.shown_ns(cores=2) == 11e6
