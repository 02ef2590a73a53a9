from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.config import GrpoConfig, RewardConfig
from learner.contrastive import train_items
from learner.errors import GroupLeftTwice, UntrainableSample
from learner.groups import Fates, JudgedGroup, Lineage, judge_group, quorum
from learner.moments import RewardMoments
from tasks.records import PolicyVersion, ScoredGroup

NOW = Lineage(PolicyVersion(epoch=0, step=10), {0: 0})


def judged(group: ScoredGroup) -> JudgedGroup:
    return judge_group(group, NOW, RewardConfig(), GrpoConfig(max_staleness=4))


def group_of(records: Any, *outcomes: Any, steps: tuple[int, ...] = (), **kinds: Any) -> ScoredGroup:
    """A group of accepted (a number), rejected, unscored ("lost") or cancelled (None) samples."""
    made = []
    for index, outcome in enumerate(outcomes):
        evaluation = None
        if outcome is not None:
            reason = "evaluator_lost" if outcome == "lost" else "incorrect"
            evaluation = (
                records.evaluation(outcome) if isinstance(outcome, float) else records.evaluation(reason=reason)
            )
        made.append(records.scored(index, evaluation, step=steps[index] if steps else 10, **kinds))
    return records.group(made)


def test_a_fit_group_is_trained_on(records: Any) -> None:
    result = judged(group_of(records, 2.0, "wrong", steps=(9, 8)))
    assert (result.fate, result.staleness, result.rewards) == ("trained", 2, (2.0, 0.0))


def test_the_oldest_token_decides_staleness(records: Any) -> None:
    result = judged(group_of(records, 2.0, 1.0, steps=(10, 5)))
    assert (result.fate, result.staleness) == ("stale", 5)


@pytest.mark.parametrize(("size", "needed"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 3), (8, 4), (16, 8)])
def test_quorum_is_half_and_at_least_two(size: int, needed: int) -> None:
    assert quorum(size) == needed


def test_below_quorum_by_unscored_and_cancelled_samples(records: Any) -> None:
    assert judged(group_of(records, 2.0, "lost", None)).fate == "below_quorum"
    assert judged(group_of(records, 2.0, "lost", None, 1.0)).fate == "trained"


def test_zero_variance_ignores_what_is_left_out(records: Any) -> None:
    assert judged(group_of(records, "wrong", "wrong", "wrong", "lost")).fate == "zero_variance"


def test_the_first_reason_is_the_word(records: Any) -> None:
    assert judged(group_of(records, 1.0, 1.0, steps=(0, 0))).fate == "stale"
    assert judged(group_of(records, 1.0, None, steps=(0, 0))).fate == "stale"
    assert judged(group_of(records, 1.0, "lost", None, None)).fate == "below_quorum"


def test_distance_goes_through_the_point_where_two_lineages_parted() -> None:
    """Epoch 1 began at step 6. A sample of epoch 0, step 8, is 2 steps down a lost branch: 2 + (9 - 6) = 5 away."""
    lineage = Lineage(PolicyVersion(epoch=1, step=9), {0: 0, 1: 6})
    assert lineage.distance(PolicyVersion(epoch=0, step=8)) == 5
    assert lineage.distance(PolicyVersion(epoch=0, step=4)) == 5
    assert lineage.distance(PolicyVersion(epoch=1, step=8)) == 1


def test_a_group_leaves_once() -> None:
    fates = Fates({"a": "trained"})
    fates.leave("b", "stale")
    with pytest.raises(GroupLeftTwice, match="after it had left as trained"):
        fates.leave("a", "stale")
    assert fates.counts() == {"trained": 1, "stale": 1, "below_quorum": 0, "zero_variance": 0}


@given(st.lists(st.tuples(st.sampled_from([3.0, 0.5, "wrong", "lost", None]), st.integers(0, 10)), min_size=1))
def test_every_group_has_one_word_and_trained_ones_have_a_gradient(records: Any, drawn: list[tuple[Any, int]]) -> None:
    result = judged(group_of(records, *[what for what, _ in drawn], steps=tuple(step for _, step in drawn)))
    assert result.fate in ("trained", "stale", "below_quorum", "zero_variance")
    if result.fate == "trained":
        items = train_items([result], GrpoConfig(), RewardMoments())
        assert len(items) == sum(what not in ("lost", None) for what, _ in drawn)
        assert any(item.advantage != 0 for item in items)


def test_a_policy_that_copies_its_best_exemplar_earns_no_advantage(records: Any) -> None:
    """Eight samples: a scripted policy answers with its prompt's best exemplar (9x) in six, with new work in two.

    The copies' advantages lie below those of the new kernels, though these are slower; where all are copies, nothing is
    trained on at all.
    """
    copies = [records.scored(i, records.evaluation(9.0 + i), step=10, copy_of="e" * 64) for i in range(8)]
    fresh = [records.scored(i, records.evaluation(1.3), step=10) for i in (6, 7)]
    items = train_items([judged(records.group([*copies[:6], *fresh]))], GrpoConfig(), RewardMoments())
    assert all(item.advantage < 0 for item in items[:6])
    assert all(item.advantage > 0 for item in items[6:])
    assert judged(records.group(copies)).fate == "zero_variance"


def test_advantages_do_not_mix_groups(records: Any) -> None:
    groups = [judged(group_of(records, 0.1, 0.2)), judged(group_of(records, 5.0, 9.0))]
    items = train_items(groups, GrpoConfig(), RewardMoments())
    torch.testing.assert_close(torch.tensor([i.advantage for i in items]), torch.tensor([-1.0, 1.0, -1.0, 1.0]))


def test_truncated_completions_can_be_masked_but_still_count(records: Any) -> None:
    samples = [
        records.scored(0, records.evaluation(2.0), step=10),
        records.scored(1, records.evaluation(reason="contract"), step=10, finish_reason="length"),
    ]
    both = train_items([judged(records.group(samples))], GrpoConfig(), RewardMoments())
    masked = train_items([judged(records.group(samples))], GrpoConfig(truncated_completions="mask"), RewardMoments())
    assert [item.advantage for item in both] == [1.0, -1.0]
    assert [item.advantage for item in masked] == [1.0]


def test_text_without_tokens_is_refused_with_the_remedy(records: Any) -> None:
    with pytest.raises(UntrainableSample, match="vllm or transformers"):
        train_items([judged(group_of(records, 2.0, 1.0, token_ids=()))], GrpoConfig(), RewardMoments())
