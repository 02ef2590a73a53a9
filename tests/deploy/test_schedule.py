"""Fairness of the choice of tasks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from deploy.graph.schedule import next_target


def test_each_target_once_per_round_in_an_order_that_differs() -> None:
    formed: Counter[str] = Counter()
    order = []
    for _ in range(12):
        target = next_target("abcd", formed, seed=1)
        assert target is not None
        formed[target] += 1
        order.append(target)
    rounds = [order[at : at + 4] for at in (0, 4, 8)]
    assert all(sorted(found) == list("abcd") for found in rounds)
    assert len({tuple(found) for found in rounds}) > 1
    assert next_target("", formed, seed=1) is None


@given(st.lists(st.sets(st.sampled_from("abcde"), max_size=4), max_size=40), st.integers(0, 5))
def test_open_targets_stay_within_one_group_of_each_other(skips: list[set[str]], seed: int) -> None:
    """Targets are skipped for good as the run goes; those that stay open are served evenly."""
    formed: Counter[str] = Counter()
    skipped: set[str] = set()
    for skip in skips:
        skipped |= skip if len(skipped | skip) < 5 else set()
        still = [target for target in "abcde" if target not in skipped]
        target = next_target(still, formed, seed)
        assert target in still
        formed[target] += 1
        assert max(formed[t] for t in still) - min(formed[t] for t in still) <= 1
