from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.config import GrpoConfig, LearnerConfig, SelfSupervisedConfig
from learner.contrastive import train_items
from learner.errors import GroupLeftTwice, UntrainableSample
from learner.groups import Fates, JudgedGroup, Lineage, judge_group, quorum
from learner.grpo import token_weights
from learner.moments import RewardMoments
from tasks.records import PolicyVersion, ScoredGroup

NOW = Lineage(PolicyVersion(epoch=0, step=10), {0: 0})


def judged(group: ScoredGroup, **grpo: Any) -> JudgedGroup:
    return judge_group(group, NOW, LearnerConfig(grpo=GrpoConfig(max_staleness=4, **grpo)))


def judged_by_success(group: ScoredGroup) -> JudgedGroup:
    """By stage 2."""
    config = LearnerConfig(stage="self_supervised", self_supervised=SelfSupervisedConfig(max_staleness=4))
    return judge_group(group, NOW, config)


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
    assert quorum(size, 0.5) == needed


@pytest.mark.parametrize(("share", "needed"), [(0.01, 2), (0.5, 3), (0.7, 4), (1.0, 5)])
def test_quorum_by_configuration(records: Any, share: float, needed: int) -> None:
    assert quorum(5, share) == needed
    group = group_of(records, 2.0, 1.0, 0.5, "lost", None)
    assert judged(group, quorum=share).fate == ("trained" if needed <= 3 else "below_quorum")


def test_below_quorum_by_unscored_and_cancelled_samples(records: Any) -> None:
    assert judged(group_of(records, 2.0, "lost", None)).fate == "below_quorum"
    assert judged(group_of(records, 2.0, "lost", None, 1.0)).fate == "trained"


def test_zero_variance_ignores_what_is_left_out(records: Any) -> None:
    assert judged(group_of(records, "wrong", "wrong", "wrong", "lost")).fate == "zero_variance"


def test_a_group_without_variance_stays_where_the_configuration_keeps_it(records: Any) -> None:
    """Its advantages are 0, and its tokens count in the step's average: 6 of 12."""
    kept = judged(group_of(records, 2.0, 2.0), zero_variance="keep")
    other = judged(group_of(records, 2.0, "wrong"), zero_variance="keep")
    assert kept.fate == "trained"
    items = train_items([kept, other], GrpoConfig(), RewardMoments())
    assert [item.advantage for item in items] == [0.0, 0.0, 1.0, -1.0]
    assert [item.group for item in items] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("outcomes", "fate", "rewards"),
    [
        ((2.0, "wrong"), "trained", (1.0, 0.0)),
        ((0.5, 9.0), "trained", (1.0, 1.0)),
        (("wrong", "wrong", "lost"), "zero_variance", (0.0, 0.0, None)),
        ((2.0, "lost", None), "below_quorum", (1.0, None, None)),
    ],
)
def test_stage_2_rewards_success_alone(
    records: Any, outcomes: tuple[Any, ...], fate: str, rewards: tuple[float | None, ...]
) -> None:
    """A slow kernel is worth what a fast one is; without a success there is nothing to learn, all successes teach."""
    result = judged_by_success(group_of(records, *outcomes))
    assert (result.fate, result.rewards) == (fate, rewards)


def test_stage_2_gives_a_copy_nothing(records: Any) -> None:
    copy = records.scored(0, records.evaluation(9.0), copy_of="e" * 64, step=10)
    own = records.scored(1, records.evaluation(0.5), step=10)
    assert judged_by_success(records.group([copy, own])).rewards == (0.0, 1.0)


def test_the_noise_of_a_group_is_that_of_its_accepted_timings(records: Any) -> None:
    """Half-widths 0.1 and 0.3 at 98 %: z = 2.3263, deviations 0.04299 and 0.12896, root mean square 0.09612. What was
    rejected or copied has no timing that was paid."""
    wide = records.evaluation(1.0, ci_low=0.9)
    wide = wide.model_copy(update={"measurement": wide.measurement.model_copy(update={"ci_high": 1.1})})
    wider = records.evaluation(2.0, ci_low=1.7)
    wider = wider.model_copy(update={"measurement": wider.measurement.model_copy(update={"ci_high": 2.3})})
    samples = [
        records.scored(0, wide, step=10), records.scored(1, wider, step=10),
        records.scored(2, records.evaluation(reason="incorrect"), step=10),
        records.scored(3, wider, step=10, copy_of="e" * 64),
    ]  # fmt: skip
    assert judged(records.group(samples)).noise == pytest.approx(0.09612, abs=1e-5)
    assert judged(records.group(samples[2:3] * 2)).noise == 0.0


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
    assert fates.counts() == {"trained": 1, "stale": 1, "below_quorum": 0, "zero_variance": 0, "measured": 0}


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


@given(st.randoms(use_true_random=False), st.sampled_from(["token", "sequence", "prompt", "constant"]))
def test_a_step_is_the_same_whatever_the_order_of_groups_and_samples(
    records: Any, rng: random.Random, aggregation: str
) -> None:
    """Each completion keeps its advantage and its weight when groups change places and samples change theirs."""
    config = GrpoConfig(aggregation=aggregation, baseline="leave_one_out")
    worths = [[3.0, 0.5, "wrong"], [1.0, 2.0, 2.0, "wrong"], [5.0, "wrong", "lost"]]

    def made(number: int, order: list[int]) -> ScoredGroup:
        samples = []
        for place, index in enumerate(order):
            outcome = worths[number][index]
            reason = "evaluator_lost" if outcome == "lost" else "incorrect"
            judgement = records.evaluation(outcome) if isinstance(outcome, float) else records.evaluation(reason=reason)
            ids = (10 * number + index,) * (1 + index)
            samples.append(records.scored(place, judgement, prompt_id=f"g{number}", token_ids=ids, step=10))
        return records.group(samples, group_id=f"g{number}")

    def step(numbers: list[int], orders: list[list[int]]) -> dict[tuple[int, ...], tuple[float, float]]:
        groups = [judged(made(number, orders[number])) for number in numbers]
        items = train_items(groups, config, RewardMoments())
        weights = token_weights([len(i.sequence.completion_ids) for i in items], [i.group for i in items], config)
        return {
            i.sequence.completion_ids: (round(i.advantage, 9), round(w, 12))
            for i, w in zip(items, weights, strict=True)
        }

    plain = [list(range(len(worth))) for worth in worths]
    assert step(rng.sample(range(3), 3), [rng.sample(order, len(order)) for order in plain]) == step([0, 1, 2], plain)
