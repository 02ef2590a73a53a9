from __future__ import annotations

import math
from typing import Any

import pytest

from learner.config import RewardConfig
from learner.reward import reward_of

PLAIN = RewardConfig()


def test_accepted_earns_its_speedup_by_protocol(records: Any) -> None:
    """Under protocol `reward` the interval's lower end 1.4 counts, else the estimate 1.5."""
    paid = records.scored(0, records.evaluation(1.5, ci_low=1.4))
    full = records.scored(0, records.evaluation(1.5, ci_low=1.4, protocol="sequential"))
    assert reward_of(paid, PLAIN) == 1.4
    assert reward_of(full, PLAIN) == 1.5
    assert reward_of(paid, RewardConfig(lower_end="never")) == 1.5
    assert reward_of(full, RewardConfig(lower_end="always")) == 1.4


def test_log_speedup(records: Any) -> None:
    sample = records.scored(0, records.evaluation(2.0))
    assert reward_of(sample, RewardConfig(shape="log_speedup")) == pytest.approx(math.log(2))


def test_same_formula_pays_at_most_its_cap(records: Any) -> None:
    fast = records.scored(0, records.evaluation(3.0, labels=("same_formula",)))
    slow = records.scored(0, records.evaluation(0.8, labels=("same_formula",)))
    assert reward_of(fast, PLAIN) == 1.0
    assert reward_of(slow, PLAIN) == 0.8
    assert reward_of(fast, RewardConfig(shape="log_speedup")) == 0.0


def test_failures_and_copies_by_configuration(records: Any) -> None:
    wrong = records.scored(0, records.evaluation(reason="incorrect"))
    assert reward_of(wrong, PLAIN) == 0.0
    assert reward_of(wrong, RewardConfig(rejected=-1.0)) == -1.0
    copy = records.scored(0, records.evaluation(9.0), copy_of="e" * 64)
    assert reward_of(copy, PLAIN) == 0.0
    assert reward_of(copy, RewardConfig(rejected=-1.0)) == -1.0
    assert reward_of(copy, RewardConfig(copy=0.25)) == 0.25
    unreadable = records.scored(0, records.evaluation(reason="contract"), readable=False)
    assert reward_of(unreadable, PLAIN) == 0.0
    assert reward_of(unreadable, RewardConfig(unreadable=-0.5)) == -0.5


def test_a_completion_cut_by_the_token_limit(records: Any) -> None:
    """By its code unless the configuration gives it a reward of its own; a copy stays a copy."""
    cut = records.scored(0, records.evaluation(1.5), finish_reason="length")
    assert reward_of(cut, PLAIN) == 1.5
    assert reward_of(cut, RewardConfig(truncated=-0.5)) == -0.5
    copied = records.scored(0, records.evaluation(1.5), finish_reason="length", copy_of="e" * 64)
    assert reward_of(copied, RewardConfig(truncated=-0.5)) == 0.0


def test_what_the_infrastructure_broke_is_left_out(records: Any) -> None:
    assert reward_of(records.scored(0, None), PLAIN) is None
    assert reward_of(records.scored(0, records.evaluation(reason="evaluator_lost")), PLAIN) is None
    lost_copy = records.scored(0, records.evaluation(reason="device_fault"), copy_of="e" * 64)
    assert reward_of(lost_copy, PLAIN) is None


def test_an_answer_cut_off_by_an_update_is_not_judged_as_a_whole_one(records: Any) -> None:
    fragment = records.scored(0, records.evaluation(reason="contract"), finish_reason="abort")
    assert reward_of(fragment, PLAIN) is None
