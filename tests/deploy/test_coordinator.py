"""The loop against fakes: whole runs, dying workers, dying coordinators; both ledgers balance at the end of each."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.graph.coordinator import Coordinator
from deploy.graph.events import ControlMeasured, CoordinatorStarted, GroupFormed, RunClosed
from deploy.graph.handles import LearnerLost, NothingToDo, WaitedTooLong, WorkerLost
from deploy.graph.held_out import HeldOutPrompt
from deploy.graph.plan import RunPlan
from deploy.graph.state import RunState

TARGETS = (("procedural:row_norm/1", "cpu"), ("procedural:pointwise/2", "cpu"))
PLAN = RunPlan("r1", TARGETS, steps=2, groups_per_step=2, samples_per_group=3, attempts=3)


def run(world: Any, plan: RunPlan = PLAN) -> RunState:
    world.groups_per_step = plan.groups_per_step
    return asyncio.run(Coordinator(plan, world.handles()).run())


def check(world: Any, state: RunState) -> None:
    """The ledgers balance, agree with the store's own record, and equal a replay of the stream."""
    state.ledger.check()
    assert state.ledger.samples.counts()["in_flight"] == 0
    assert world.records == state.ledger.samples.counts()["dispatched"]
    for name, samples in world.groups.items():
        if name in state.groups:
            assert {e.outcome for e in samples.values()} <= {state.left[e.sample_id].outcome for e in samples.values()}
    replayed = RunState.replay(world.events)
    assert replayed.ledger.samples.counts() == state.ledger.samples.counts()
    assert replayed.ledger.groups.counts() == state.ledger.groups.counts()


def check_held_out(state: RunState, every: int) -> None:
    """Every step that was due was measured, each key once; nothing held out was trained on."""
    due = {step for step in range(state.step + 1) if every and (step % every == 0 or step == state.step)}
    assert due <= {key[0] for key in state.held_out}
    assert all(event.prompts == (2 if key[1:] == ("new", "cpu", True) else 1) for key, event in state.held_out.items())
    for name, (_, fate) in state.ledger.groups.fates.items():
        assert (fate == "measured") == bool(state.groups[name].held_out)


def test_two_steps_by_hand(World: type[Any]) -> None:
    """2 steps of 2 groups of 3 samples: 4 groups, 12 samples, all accepted, all trained; each task twice."""
    world = World()
    state = run(world)
    check(world, state)
    assert state.closed == "finished"
    assert state.step == 2
    assert state.ledger.samples.counts()["accepted"] == 12
    assert state.ledger.groups.counts()["trained"] == 4
    assert sorted(group.task_id for group in state.groups.values()) == sorted([t for t, _ in TARGETS] * 2)
    assert [group.policy_step for group in state.groups.values()] == [0, 0, 1, 1]
    assert world.overlaps == 0
    assert [call for call in world.calls if call.startswith("seed")] == [f"seed {task}" for task, _ in TARGETS]
    assert len(state.confirmed) == 2
    assert (world.drawn_asleep, world.evaluated_awake) == (0, 0)


def test_three_turns_by_hand(World: type[Any]) -> None:
    """4 groups of 3 conversations of 3 turns: 36 samples. A later turn is drawn alone, after what it answers to."""
    world = World()
    state = run(world, replace(PLAN, turns=3))
    check(world, state)
    assert state.step == 2
    assert state.ledger.samples.counts()["accepted"] == 36
    assert {(group.size, group.turns, group.width) for group in state.groups.values()} == {(9, 3, 3)}
    group = next(iter(state.groups))
    drawn = [call for call in world.calls if call.startswith(f"draw {group}")]
    assert drawn[0] == f"draw {group} [0, 1, 2]"
    assert sorted(drawn[1:]) == [f"draw {group} [{index}]" for index in range(3, 9)]
    order = list(state.left)
    for name in (f"{group}/{index}" for index in range(3, 9)):
        before = f"{group}/{int(name.rpartition('/')[2]) - 3}"
        assert order.index(before) < order.index(name)
        assert order.index(before) < world.asked[name]


def test_a_turn_without_an_outcome_takes_the_later_ones_with_it(World: type[Any]) -> None:
    """Conversation 1's first turn stays unscored: its other two leave as cancelled, everyone else talks on."""

    class Cracked(World):  # type: ignore[misc, valid-type]
        def unscored(self, index: int) -> bool:
            return index == 1

    world = Cracked()
    state = run(world, replace(PLAN, turns=3))
    check(world, state)
    counts = state.ledger.samples.counts()
    assert (counts["accepted"], counts["unscored"], counts["cancelled"]) == (24, 4, 8)
    assert {event.reason for event in state.left.values() if event.outcome == "cancelled"} == {"turn_lost"}


HELD_OUT = (
    HeldOutPrompt("new", "procedural:row_norm/7", "cpu", True),
    HeldOutPrompt("new", "procedural:row_norm/8", "cpu", True),
    HeldOutPrompt("new", "procedural:row_norm/7", "cpu", False),
    HeldOutPrompt("far", "procedural:pooling/1", "cpu", True),
)


@pytest.mark.parametrize(("every", "steps"), [(1, (0, 1, 2, 3)), (2, (0, 2, 3)), (5, (0, 3))])
def test_held_out_sets_are_measured_before_in_between_and_after(
    World: type[Any], every: int, steps: tuple[int, ...]
) -> None:
    """3 steps, 4 prompts of 2 samples in 3 keys. None of them is trained on, counts for a step or is confirmed."""
    world = World()
    plan = replace(PLAN, steps=3, held_out=HELD_OUT, eval_every=every, held_out_samples=2, held_out_seeds=True)
    state = run(world, plan)
    check(world, state)
    assert state.ledger.groups.counts()["trained"] == 6
    assert state.ledger.groups.counts()["measured"] == 4 * len(steps)
    assert [key[0] for key in state.held_out] == [step for step in steps for _ in range(3)]
    first = state.held_out[0, "new", "cpu", True]
    assert (first.prompts, first.samples, first.accepted_share) == (2, 4, 1.0)
    assert world.measured_late == 0
    assert len(state.confirmed) == 2
    seeded = [call.removeprefix("seed ") for call in world.calls if call.startswith("seed")]
    assert seeded == [*(task for task, _ in TARGETS), *dict.fromkeys(prompt.task_id for prompt in HELD_OUT)]


def test_a_run_that_ends_before_its_steps_is_measured_at_its_end_too(World: type[Any]) -> None:
    """4 groups at most, the last two of which are dropped: one step of two, and the run is over."""
    world = World(zero_variance=(2, 3))
    state = run(world, replace(PLAN, max_groups=4, held_out=HELD_OUT, eval_every=5, held_out_samples=2))
    check(world, state)
    assert state.step == 1
    assert {key[0] for key in state.held_out} == {0, 1}


def test_a_held_out_task_that_does_not_fit_is_left_out(World: type[Any]) -> None:
    world = World(refuse=("procedural:row_norm/8", "procedural:pooling/1"))
    state = run(world, replace(PLAN, held_out=HELD_OUT, eval_every=2, held_out_samples=2))
    check(world, state)
    assert state.held_out[0, "new", "cpu", True].prompts == 1
    assert not any(key[1] == "far" for key in state.held_out)


def test_controls_are_written_down_and_cost_no_sample(World: type[Any]) -> None:
    """One is due at every second sample that left: six of twelve; off, nobody is asked. Evaluators that die over
    them lose nothing."""
    world = World()
    state = run(world, replace(PLAN, controls=True))
    check(world, state)
    assert sum(isinstance(event, ControlMeasured) for event in world.events) == 6
    assert state.controls["cpu", "reward"].measured == 12
    assert state.ledger.samples.counts()["accepted"] == 12

    world = World()
    run(world)
    assert world.controls == 0

    class Fragile(World):  # type: ignore[misc, valid-type]
        def maybe_die(self, what: str) -> None:
            if "control" in what:
                raise WorkerLost(what)

    world = Fragile()
    state = run(world, replace(PLAN, controls=True))
    check(world, state)
    assert world.controls == 12
    assert state.controls == {}
    assert state.ledger.samples.counts()["accepted"] == 12


def test_a_control_that_never_ends_costs_its_time_and_no_sample(World: type[Any]) -> None:
    world = World()
    handles = world.handles()

    async def never(task_id: str, device_type: str) -> None:
        await asyncio.sleep(3600)

    handles.scorers.control = never
    plan = replace(PLAN, controls=True, evaluate_timeout_s=0.02)
    world.groups_per_step = plan.groups_per_step
    state = asyncio.run(Coordinator(plan, handles).run())
    check(world, state)
    assert state.ledger.samples.counts()["accepted"] == 12


def test_staleness_bounds_what_is_formed(World: type[Any]) -> None:
    """With staleness 1, step s may use groups of step s - 1; without a bound every group would be of step 0."""
    plan = replace(PLAN, steps=4, max_staleness=1, take_turns=False, concurrent_scores=4)
    world = World(seed=3)
    state = run(world, plan)
    check(world, state)
    trained_at = {index: index // plan.groups_per_step for index in range(8)}
    for index, group in enumerate(state.groups.values()):
        assert trained_at[index] - group.policy_step <= 1


def test_a_task_that_does_not_fit_is_skipped_with_its_reason(World: type[Any]) -> None:
    world = World(refuse=(TARGETS[0][0],))
    state = run(world)
    check(world, state)
    assert state.skipped[TARGETS[0][0]].reason == "prompt_too_long"
    assert {group.task_id for group in state.groups.values()} == {TARGETS[1][0]}


def test_no_task_left_is_one_sentence(World: type[Any]) -> None:
    world = World(refuse=tuple(task for task, _ in TARGETS))
    with pytest.raises(NothingToDo, match="needs 900 of 512 tokens"):
        run(world)


def test_dropped_groups_are_replaced_up_to_the_limit(World: type[Any]) -> None:
    """Group 1 has zero variance: a fifth group makes up for it; with max_groups = 4 the last step takes one group."""
    state = run(World(zero_variance=(1,)))
    assert state.ledger.groups.counts()["trained"] == 4
    assert state.ledger.groups.counts()["zero_variance"] == 1
    state = run(World(zero_variance=(1,)), replace(PLAN, max_groups=4))
    assert state.ledger.groups.counts()["trained"] == 3
    assert state.step == 2


def test_a_run_whose_groups_are_all_dropped_ends_with_the_reason(World: type[Any]) -> None:
    """A solved task gives groups without variance for ever: after 6 of them the run says so, and a group that is
    trained in between starts the count anew."""
    with pytest.raises(NothingToDo, match=r"last 6 groups gave no step \(6 zero variance\).*run.give_up_after"):
        run(World(zero_variance=tuple(range(100))), replace(PLAN, give_up_after=6))
    state = run(World(zero_variance=(0, 1, 2, 3, 6, 7, 8, 9)), replace(PLAN, give_up_after=6))
    assert state.closed == "finished"


def test_generators_are_woken_after_a_call_of_the_learner_without_a_step(World: type[Any]) -> None:
    """Both groups of the first round are dropped, so nothing is published, and the next draw needs them awake."""
    world = World(zero_variance=(0, 1))
    state = run(world)
    check(world, state)
    assert state.ledger.groups.counts()["trained"] == 4
    assert (world.drawn_asleep, world.evaluated_awake) == (0, 0)


def test_a_wait_names_what_it_waited_for(World: type[Any]) -> None:
    class Deaf(World):
        async def tick(self) -> None:
            await asyncio.sleep(3600)

    with pytest.raises(WaitedTooLong, match=r"Waited 0.05 s for the store to append.*cluster.store_timeout_s"):
        run(Deaf(), replace(PLAN, store_timeout_s=0.05))


def test_a_learner_that_dies_over_one_step_ends_the_run_with_the_probable_cause(World: type[Any]) -> None:
    class Doomed(World):  # type: ignore[misc, valid-type]
        def complete(self) -> list[str]:
            raise WorkerLost("the learner died")

    with pytest.raises(LearnerLost, match=r"died 4 times in one step.*row_tokens"):
        run(Doomed())


def test_stop_cancels_in_the_ledger_and_closes(World: type[Any]) -> None:
    world = World()
    coordinator = Coordinator(replace(PLAN, grace_s=0.0), world.handles())

    async def go() -> RunState:
        task = asyncio.create_task(coordinator.run())
        while not any(isinstance(event, GroupFormed) for event in world.events):
            await asyncio.sleep(0)
        coordinator.stop()
        return await task

    state = asyncio.run(go())
    state.ledger.check()
    assert state.closed == "stopped"
    assert state.ledger.samples.counts()["cancelled"] > 0
    assert state.ledger.samples.counts()["in_flight"] == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.0, 0.25), st.booleans())
def test_dying_workers_leave_balanced_ledgers(World: type[Any], seed: int, fault_rate: float, take_turns: bool) -> None:
    world = World(seed=seed, fault_rate=fault_rate)
    changed = {
        "take_turns": take_turns, "max_staleness": seed % 2, "controls": bool(seed % 3), "turns": 1 + seed % 3,
        "held_out": HELD_OUT, "eval_every": seed % 4, "held_out_samples": 2,
    }  # fmt: skip
    state = run(world, replace(PLAN, concurrent_scores=2, attempts=6, **changed))
    check(world, state)
    assert state.step >= 2
    assert world.drawn_asleep == 0
    assert world.measured_late == 0
    check_held_out(state, seed % 4)
    if take_turns:
        assert world.overlaps == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.0, 0.15))
def test_a_killed_coordinator_is_replaced_by_replay(World: type[Any], seed: int, fault_rate: float) -> None:
    """The coordinator is cut off at random moments up to six times; each successor replays the stream, and in the end
    nothing was lost or counted twice."""
    world, rng = World(seed=seed, fault_rate=fault_rate), random.Random(seed)

    async def life(rounds: int | None) -> RunState | None:
        world.busy = dict.fromkeys(world.busy, 0)
        plan = replace(PLAN, attempts=6, turns=1 + seed % 3, held_out=HELD_OUT, eval_every=seed % 4, held_out_samples=2)
        task = asyncio.create_task(Coordinator(plan, world.handles()).run())
        if rounds is None:
            return await task
        for _ in range(rounds):
            await asyncio.sleep(0)
            if task.done():
                return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None

    state = None
    for _ in range(6):
        state = state or asyncio.run(life(rng.randint(1, 120)))
    state = state or asyncio.run(life(None))
    assert state is not None
    check(world, state)
    assert state.step >= 2
    check_held_out(state, seed % 4)
    started = [event.incarnation for event in world.events if isinstance(event, CoordinatorStarted)]
    assert started == list(range(1, len(started) + 1))
    assert isinstance(world.events[-1], RunClosed)
