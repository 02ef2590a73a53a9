"""The policy of confirmation: when a speedup is measured again, and what stands after it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluator.judgement.confirm import UNCONFIRMED, conclude, is_jump, needs_confirmation
from tasks.figures import times
from tasks.records import Evaluation, Measurement


def accepted(speedup: float, low: float, high: float, device_type: str = "cpu") -> Evaluation:
    measurement = Measurement(
        speedup=speedup, ci_low=low, ci_high=high, reference_ms=6, candidate_ms=6 / speedup, pairs=20,
        device_type=device_type,
    )  # fmt: skip
    return Evaluation(
        outcome="accepted", step="time", measurement=measurement, task_id="t", task_hash="h", candidate_hash="c",
        device_type=device_type, labels=("half",), facts={"parameters": "none"}, detail={"seed": "ab"},
    )  # fmt: skip


def other(outcome: Any, reason: Any) -> Evaluation:
    return Evaluation(
        outcome=outcome, reason=reason, step="check", message="No.", task_id="t", task_hash="h", candidate_hash="c"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("score", "best", "asked"),
    [
        (1.2, None, True), (0.9, None, False), (1.0, None, False), (3.1, None, True),
        (1.2, 1.1, True), (1.2, 1.2, False), (1.2, 2.0, False), (2.9, 3.0, False),
        (3.1, 10.0, True), (0.9, 0.5, False), (0.9, 0.44, True), (0.9, 0.45, False), (5.0, 2.0, True),
    ],
)  # fmt: skip
def test_a_new_best_and_a_jump_are_measured_again(score: float, best: float | None, asked: bool) -> None:
    """A new best above the reference; above 3; above twice the best (0.9 against 0.44, not against 0.45)."""
    assert needs_confirmation(score, best) is asked


def test_fresh_seeds_on_the_only_device_are_enough() -> None:
    assert not needs_confirmation(5.0, None, confirmed=True, elsewhere=False)
    assert needs_confirmation(5.0, None, confirmed=True, elsewhere=True)
    assert needs_confirmation(5.0, None, confirmed=False, elsewhere=False)


def test_the_threshold_of_a_jump_is_configured() -> None:
    assert is_jump(2.5, None, above=2.0)
    assert not is_jump(2.5, None)
    assert is_jump(2.5, 2.0, jump=1.2)
    assert not is_jump(2.5, 2.0, jump=1.3)


@pytest.mark.parametrize("device_type", ["cpu", "H100"])
@pytest.mark.parametrize(
    ("again", "cpu", "gpu"),
    [
        ((1.9, 1.88, 1.92), (2.0, True), (2.0, True)),
        ((1.81, 1.8, 1.82), (2.0, True), (2.0, True)),
        ((1.5, 1.4, 1.96), (2.0, True), (2.0, True)),
        ((1.5, 1.4, 1.6), (1.5, False), None),
        ((2.6, 2.5, 2.7), (2.0, False), None),
        ((1.01, 1.0, 1.02), (1.01, False), None),
        ((0.99, 0.9, 1.0), None, None),
    ],
    ids=["within a tenth", "just within", "overlapping", "lower", "higher", "above half", "below half"],
)
def test_what_stands_of_two_measurements(
    device_type: str, again: tuple[float, float, float], cpu: tuple[float, bool] | None, gpu: tuple[float, bool] | None
) -> None:
    """First 2.0 (1.95 to 2.05). Each answer: the speedup that scores and whether it is confirmed; None: it is not."""
    first = accepted(2.0, 1.95, 2.05, device_type)
    stands = conclude(first, accepted(*again, device_type), other_device=True)
    wanted = cpu if device_type == "cpu" else gpu
    assert stands.facts["confirmation"]["other_device"]
    assert stands.facts["parameters"] == "none"
    assert stands.step == "confirm"
    assert Evaluation.from_json(stands.to_json()) == stands
    if wanted is None:
        assert (stands.outcome, stands.reason, stands.detail["defence"]) == (
            "rejected", "not_confirmed", "confirmation",
        )  # fmt: skip
        assert "2.00x" in stands.message
        assert "another device" in stands.message
        return
    assert stands.outcome == "accepted"
    assert stands.measurement is not None
    assert (stands.measurement.speedup, stands.measurement.confirmed) == wanted
    assert times(wanted[0]) in stands.message


def test_a_second_evaluation_that_rejects_stands_with_its_own_reason() -> None:
    stands = conclude(accepted(4.0, 3.9, 4.1), other("rejected", "caching"))
    assert (stands.outcome, stands.reason, stands.detail["first_speedup"]) == ("rejected", "caching", 4.0)


@pytest.mark.parametrize("second", [None, other("unscored", "device_fault")])
def test_a_failure_of_ours_costs_the_candidate_nothing(second: Evaluation | None) -> None:
    first = accepted(4.0, 3.9, 4.1)
    stands = conclude(first, second)
    assert stands.outcome == "accepted"
    assert stands.measurement == first.measurement
    assert set(stands.labels) == {"half", UNCONFIRMED}
    assert "could not be measured again" in stands.message


def test_only_what_was_accepted_is_confirmed() -> None:
    with pytest.raises(ValueError, match="only an accepted"):
        conclude(other("rejected", "crash"), accepted(1.0, 0.9, 1.1))


@given(st.floats(0.1, 50), st.floats(0.1, 50), st.floats(1.001, 1.2), st.sampled_from(["cpu", "H100"]))
def test_nobody_gains_by_a_second_measurement(first: float, second: float, width: float, device_type: str) -> None:
    stands = conclude(
        accepted(first, first / width, first * width, device_type),
        accepted(second, second / width, second * width, device_type),
    )
    if stands.outcome == "accepted":
        assert stands.measurement is not None
        assert stands.measurement.speedup <= first
        assert stands.measurement.ci_low <= first / width


@pytest.mark.parametrize("again", [(1.5, 1.4, 1.6), (0.5, 0.4, 0.6), (2.6, 2.5, 2.7)])
def test_a_value_that_was_confirmed_once_is_not_after_it_fails(again: tuple[float, float, float]) -> None:
    first = accepted(2.0, 1.95, 2.05)
    once = conclude(first, accepted(2.0, 1.95, 2.05))
    assert once.measurement is not None
    assert once.measurement.confirmed
    twice = conclude(once, accepted(*again))
    assert twice.measurement is not None
    assert not twice.measurement.confirmed
