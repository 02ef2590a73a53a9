"""Turn taking: exclusion, progress and fairness over random schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.graph.turns import ROLES, Role, Turns


def test_one_step_on_a_shared_device() -> None:
    """Generate 2, evaluate 2, learn 1: while a role runs, no other starts; a role's end passes the turn on."""
    turns = Turns(shared=True)
    assert not turns.may_start("evaluate", {"generate": 2, "evaluate": 1})
    turns = turns.start("generate", {"generate": 2}).start("generate", {"generate": 1})
    assert turns.pass_on({"evaluate": 1}).turn == "generate"
    turns = turns.finish("generate").finish("generate").pass_on({"evaluate": 2})
    assert turns.turn == "evaluate"
    turns = turns.start("evaluate", {"evaluate": 2})
    with pytest.raises(ValueError, match="learn may not start while evaluate has its turn"):
        turns.start("learn", {"learn": 1})
    turns = turns.finish("evaluate").pass_on({"learn": 1})
    assert turns.turn == "learn"


def test_apart_everything_may_run() -> None:
    turns = Turns(shared=False)
    for role in ROLES:
        turns = turns.start(role, {})
    assert [turns.count(role) for role in ROLES] == [1, 1, 1]


def test_finish_without_start_is_refused() -> None:
    with pytest.raises(ValueError, match="no unit of learn runs"):
        Turns(shared=True).finish("learn")


@given(
    st.dictionaries(st.sampled_from(ROLES), st.integers(0, 30), min_size=3, max_size=3),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_exclusive_and_every_unit_runs(work: dict[Role, int], quota: int, rng) -> None:
    """Any amount of work finishes; two roles never overlap; a waiting role sees at most one turn of each other role."""
    turns = Turns(shared=True, quota=quota)
    waiting: dict[Role, int] = dict(work)
    skipped: dict[Role, int] = dict.fromkeys(ROLES, 0)
    for _ in range(2000):
        if not any(waiting.values()) and not any(turns.count(role) for role in ROLES):
            break
        before = turns.turn
        turns = turns.pass_on(waiting)
        if turns.turn != before:
            for role in ROLES:
                skipped[role] = skipped[role] + 1 if role != turns.turn and waiting[role] else 0
            assert max(skipped.values()) <= len(ROLES) - 1
        startable = [role for role in ROLES if waiting[role] and turns.may_start(role, waiting)]
        if startable and (rng.random() < 0.6 or not turns.count(turns.turn)):
            role = startable[0]
            turns = turns.start(role, waiting)
            waiting[role] -= 1
        elif turns.count(turns.turn):
            turns = turns.finish(turns.turn)
        assert sum(turns.count(role) > 0 for role in ROLES) <= 1
    assert not any(waiting.values())
