"""Several turns: what each earns, and the baseline of its own turn."""

from __future__ import annotations

from typing import Any

import pytest

from learner.config import GrpoConfig, LearnerConfig
from learner.contrastive import train_items
from learner.groups import JudgedGroup, Lineage, judge_group
from learner.loop import group_figures
from learner.moments import RewardMoments
from learner.self_supervised import reinforce_items
from tasks.records import PolicyVersion, ScoredGroup

NOW = Lineage(PolicyVersion(), {0: 0})
PLAIN = GrpoConfig(smoothing="none", scale="none", turn_discount=0.5)


def talk(records: Any, *turns: tuple[Any, ...]) -> ScoredGroup:
    """A group of conversations: outcomes by turn, one for each conversation, as in test_groups."""
    width, samples = len(turns[0]), []
    for turn, outcomes in enumerate(turns):
        for first, outcome in enumerate(outcomes):
            judgement = None
            if outcome is not None:
                lost = "evaluator_lost" if outcome == "lost" else "incorrect"
                numeric = isinstance(outcome, float)
                judgement = records.evaluation(outcome) if numeric else records.evaluation(reason=lost)
            samples.append(
                records.scored(
                    turn * width + first, judgement, turn=turn, prompt_token_ids=(1, 2, 3, 10 + first) if turn else (),
                    token_ids=(20 + first,) * (1 + turn),
                )
            )  # fmt: skip
    return records.group(samples, turns=len(turns))


def judged(group: ScoredGroup, grpo: GrpoConfig = PLAIN, **settings: Any) -> JudgedGroup:
    return judge_group(group, NOW, LearnerConfig(grpo=grpo, **settings))


def test_a_turn_earns_its_own_reward_and_a_share_of_what_follows(records: Any) -> None:
    """Rewards 0 then 2, 1 then 0, 3 then 1, with discount 0.5: the first turn earns 1, 1, 3.5, the second 2, 0, 1."""
    group = judged(talk(records, ("wrong", 1.0, 3.0), (2.0, "wrong", 1.0)))
    first, second = ([value for _, value in turn] for turn in group.by_turn(0.5))
    assert first == [1.0, 1.0, 3.5]
    assert second == [2.0, 0.0, 1.0]


def test_the_baseline_is_that_of_the_others_in_the_same_turn(records: Any) -> None:
    """First turn 1, 1, 3.5: others' means 2.25, 2.25, 1: advantages -1.25, -1.25, 2.5. Second turn 2, 0, 1: others'
    means 0.5, 1.5, 1: advantages 1.5, -1.5, 0. `baseline = "mean"` changes nothing: with turns it is leave-one-out."""
    group = judged(talk(records, ("wrong", 1.0, 3.0), (2.0, "wrong", 1.0)))
    for baseline in ("mean", "leave_one_out"):
        items = train_items([group], PLAIN.model_copy(update={"baseline": baseline}), RewardMoments())
        assert [item.advantage for item in items] == pytest.approx([-1.25, -1.25, 2.5, 1.5, -1.5, 0.0])


def test_a_later_turn_answers_its_own_conversation(records: Any) -> None:
    items = train_items([judged(talk(records, ("wrong", 1.0), (2.0, "wrong")))], PLAIN, RewardMoments())
    assert [item.sequence.prompt_ids for item in items] == [(1, 2, 3), (1, 2, 3), (1, 2, 3, 10), (1, 2, 3, 11)]
    assert [item.sequence.completion_ids for item in items] == [(20,), (21,), (20, 20), (21, 21)]


def test_a_conversation_that_the_infrastructure_cut_short_is_left_out_whole(records: Any) -> None:
    """The second conversation's return is unknown: neither rewarded nor punished. Its first turn would have lowered the
    others' baseline."""
    group = judged(talk(records, (1.0, 9.0, 3.0), (2.0, "lost", "wrong")))
    first, second = ([value for _, value in turn] for turn in group.by_turn(0.5))
    assert (first, second) == ([2.0, 3.0], [2.0, 0.0])
    assert len(train_items([group], PLAIN, RewardMoments())) == 4


@pytest.mark.parametrize(
    ("turns", "fate"),
    [
        ((("wrong", 1.0), (1.0, 1.0)), "trained"),
        ((("wrong", "wrong"), (1.0, "wrong")), "trained"),
        ((("wrong", "wrong"), ("wrong", "wrong")), "zero_variance"),
        (((1.0, 2.0, 1.0, 1.0), ("lost", None, "lost", 1.0)), "below_quorum"),
    ],
)
def test_the_word_of_a_group_of_conversations(records: Any, turns: tuple[tuple[Any, ...], ...], fate: str) -> None:
    """Quorum counts whole conversations; variance in any turn is enough."""
    assert judged(talk(records, *turns)).fate == fate


def test_stage_2_takes_every_turn_by_itself(records: Any) -> None:
    group = judged(talk(records, ("wrong", 1.0), (2.0, None)), stage="self_supervised")
    items = reinforce_items([group], LearnerConfig().self_supervised)
    assert [item.advantage for item in items] == [0.0, 1.0, 1.0]
    assert [item.sequence.prompt_ids for item in items] == [(1, 2, 3), (1, 2, 3), (1, 2, 3, 10)]


def test_figures_tell_the_turns_apart(records: Any) -> None:
    figures = group_figures([judged(talk(records, ("wrong", 1.0), (2.0, "wrong")))])
    assert (figures["reward_mean_turn_0"], figures["reward_mean_turn_1"]) == (0.5, 1.0)
    assert "reward_mean_turn_0" not in group_figures([judged(talk(records, ("wrong", 1.0)))])
