"""Both ledgers balance after any events in any repetition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.graph.events import (
    Event,
    GroupFormed,
    GroupLeft,
    LineageStarted,
    SampleLeft,
    event_from_dict,
    event_to_dict,
)
from deploy.graph.ledger import GROUP_FATES, SAMPLE_OUTCOMES, Ledger, LedgerError, sample_id


def formed(group: str, size: int = 4) -> GroupFormed:
    return GroupFormed(group_id=group, task_id="procedural:row_norm/1", device_type="cpu", size=size)


def left(group: str, index: int, outcome: str) -> SampleLeft:
    return SampleLeft(sample_id=sample_id(group, index), group_id=group, outcome=outcome)  # type: ignore[arg-type]


def test_by_hand() -> None:
    """Two groups of 4: 8 dispatched; 3 accepted, 1 rejected, 1 unscored, 1 cancelled leave 2 in flight."""
    events: list[Event] = [formed("a"), formed("b")]
    events += [left("a", 0, "accepted"), left("a", 1, "accepted"), left("a", 2, "rejected"), left("a", 3, "unscored")]
    events += [left("b", 0, "cancelled"), left("b", 1, "accepted"), GroupLeft(group_id="a", fate="trained")]
    ledger = Ledger.replay(events)
    ledger.check()
    assert ledger.samples.counts() == {
        "dispatched": 8, "accepted": 3, "rejected": 1, "unscored": 1, "cancelled": 1, "in_flight": 2,
    }  # fmt: skip
    assert ledger.groups.counts() == {
        "formed": 2, "trained": 1, "stale": 0, "below_quorum": 0, "zero_variance": 0, "measured": 0, "pending": 1,
    }  # fmt: skip
    assert ledger.open_samples("b") == [2, 3]
    assert ledger.groups.pending() == ["b"]


def test_first_outcome_of_a_sample_stands() -> None:
    ledger = Ledger.replay([formed("a", 1), left("a", 0, "cancelled"), left("a", 0, "accepted")])
    assert ledger.samples.counts()["cancelled"] == 1
    assert ledger.samples.counts()["accepted"] == 0
    assert ledger.samples.duplicates == 1


def test_a_lost_lineage_gives_its_groups_back() -> None:
    """Trained in epoch 0, not in the checkpoint that epoch 1 starts from: pending, then stale in epoch 1."""
    ledger = Ledger.replay([formed("a"), formed("b")])
    for group in ("a", "b"):
        ledger.apply(GroupLeft(group_id=group, fate="trained", epoch=0))
    ledger.apply(LineageStarted(epoch=1, step=1, reopened=("b",)))
    assert ledger.groups.counts() | {} == {
        "formed": 2, "trained": 1, "stale": 0, "below_quorum": 0, "zero_variance": 0, "measured": 0, "pending": 1,
    }  # fmt: skip
    assert ledger.apply(GroupLeft(group_id="b", fate="stale", epoch=1))
    assert not ledger.apply(GroupLeft(group_id="b", fate="trained", epoch=1))
    assert ledger.groups.counts()["stale"] == 1
    ledger.check()


@pytest.mark.parametrize(
    "event", [left("x", 0, "accepted"), left("a", 4, "accepted"), GroupLeft(group_id="x", fate="stale")]
)
def test_what_was_never_dispatched_cannot_leave(event: Event) -> None:
    ledger = Ledger.replay([formed("a", 4)])
    with pytest.raises(LedgerError, match="never"):
        ledger.apply(event)


def test_a_group_keeps_its_size() -> None:
    ledger = Ledger.replay([formed("a", 4)])
    with pytest.raises(LedgerError, match="4 samples and again with 5"):
        ledger.apply(formed("a", 5))


def test_an_unbalanced_ledger_is_found() -> None:
    ledger = Ledger.replay([formed("a", 2)])
    ledger.samples.in_flight.discard("a/1")
    with pytest.raises(LedgerError, match="1 samples were dispatched, but the groups formed hold 2"):
        ledger.check()


GROUPS = ["g0", "g1", "g2"]
EVENTS = st.one_of(
    st.builds(left, st.sampled_from(GROUPS), st.integers(0, 2), st.sampled_from(SAMPLE_OUTCOMES)),
    st.builds(
        lambda group, fate, epoch: GroupLeft(group_id=group, fate=fate, epoch=epoch),
        st.sampled_from(GROUPS), st.sampled_from(GROUP_FATES), st.integers(0, 3),
    ),
    st.builds(
        lambda epoch, groups: LineageStarted(epoch=epoch, step=0, reopened=tuple(groups)),
        st.integers(1, 3), st.lists(st.sampled_from(GROUPS), max_size=3),
    ),
)  # fmt: skip


@given(st.lists(EVENTS, max_size=40), st.data())
def test_balanced_after_every_event_and_idempotent(events: list[Event], data: st.DataObject) -> None:
    """Whatever happens in whatever order, each prefix balances; delivering a sample's or a group's event again right
    away changes no count."""
    ledger = Ledger.replay([formed(group, 3) for group in GROUPS])
    for event in events:
        ledger.apply(event)
        ledger.check()
        before = ledger.samples.counts(), ledger.groups.counts()
        if data.draw(st.booleans()):
            ledger.apply(event)
            assert (ledger.samples.counts(), ledger.groups.counts()) == before


@given(st.lists(EVENTS, max_size=30))
def test_replay_from_stored_form_gives_the_same_ledger(events: list[Event]) -> None:
    whole = [formed(group, 3) for group in GROUPS] + events
    stored = [event_from_dict(event_to_dict(event)) for event in whole]
    first, second = Ledger.replay(whole), Ledger.replay(stored)
    assert first.samples.counts() == second.samples.counts()
    assert first.groups.fates == second.groups.fates
