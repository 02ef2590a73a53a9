from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.staleness import StalenessError, StalenessState


def test_capacity_by_hand() -> None:
    """batch 2, staleness 1: (1 + 0 + 1) * 2 = 4 groups at version 0; after one step (1 + 1 + 1) * 2 - 4 = 2 more."""
    state = StalenessState(batch=2, max_staleness=1, concurrency=100)
    assert state.capacity == 4
    state = state.submit(4)
    assert state.capacity == 0
    state = state.accept(2).drop(1)
    assert state.capacity == 1
    state = state.submit(1).accept(2).step(1)
    assert state.capacity == 2


def test_on_policy_generation_waits_for_each_step() -> None:
    state = StalenessState(batch=3, max_staleness=0, concurrency=100).submit(3).accept(3)
    assert state.capacity == 0
    assert state.step(1).capacity == 3


def test_concurrency_bounds_too() -> None:
    state = StalenessState(batch=100, max_staleness=0, concurrency=5)
    assert state.capacity == 5
    assert state.submit(2).capacity == 3


def test_groups_withdrawn_by_the_learner_give_their_place_back() -> None:
    """Without it, batch 1 at staleness 0 would stop for ever after one group of zero variance."""
    state = StalenessState(batch=1, max_staleness=0, concurrency=9).submit().accept()
    assert state.capacity == 0
    assert state.withdraw().capacity == 1


def test_resume_counts_steps_and_waiting_groups() -> None:
    state = StalenessState.resumed(batch=2, max_staleness=1, concurrency=9, version=5, waiting=1)
    assert state.capacity == (1 + 5 + 1) * 2 - 11 == 3


@pytest.mark.parametrize("bad", ["submit(3)", "accept()", "drop()", "withdraw()", "submit(-1)", "step(-1)"])
def test_lost_or_doubled_groups_are_errors(bad: str) -> None:
    state = StalenessState(batch=1, max_staleness=1, concurrency=9)
    with pytest.raises(StalenessError):
        eval(f"state.{bad}", {"state": state})


@given(
    batch=st.integers(1, 4),
    staleness=st.integers(0, 3),
    concurrency=st.integers(1, 12),
    moves=st.lists(st.integers(0, 99)),
)
def test_no_trained_group_is_staler_than_allowed(
    batch: int, staleness: int, concurrency: int, moves: list[int]
) -> None:
    """A run of random moves in which groups are trained in the order of acceptance, running ones in any order."""
    state = StalenessState(batch=batch, max_staleness=staleness, concurrency=concurrency)
    running: list[int] = []
    waiting: deque[int] = deque()
    for move in moves:
        kind = move % 5
        if kind in (0, 1) and state.capacity:
            state = state.submit()
            running.append(state.version)
        elif kind == 2 and running:
            waiting.append(running.pop(move % len(running)))
            state = state.accept()
        elif kind == 3 and running:
            running.pop(move % len(running))
            state = state.drop()
        elif kind == 4 and len(waiting) >= batch:
            # The step makes version + 1 from weights of `version`: that is the version its groups are compared with.
            assert all(state.version - waiting.popleft() <= staleness for _ in range(batch))
            state = state.step(state.version + 1)
        assert state.submitted == state.running + state.accepted + state.dropped
        assert (state.running, state.accepted) == (len(running), state.version * batch + len(waiting))
        assert 0 <= state.running <= concurrency
        assert state.capacity or running or len(waiting) >= batch, "nothing can move any more"
