"""Eq. 1 against its closed form, by hand and by chi-squared."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exemplar_store.buckets import Bucket
from exemplar_store.sampling import Buckets, Nothing, Pick, Uniform, create_strategy, draw_distinct, eq1_probabilities

SHELF = [Bucket(5, 3, 0.55), Bucket(10, 10, 1.04), Bucket(12, 1, 1.25), Bucket(20, 2, 2.05)]


def chi_squared_limit(freedom: int, z: float = 4.26) -> float:
    """Wilson and Hilferty's quantile of chi-squared; z = 4.26 leaves one false alarm in 100,000."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + z * math.sqrt(spread)) ** 3


def chi_squared(counts: Counter, expected: dict, draws: int) -> float:
    assert set(counts) <= set(expected)
    return sum((counts[key] - draws * share) ** 2 / (draws * share) for key, share in expected.items())


def closed_form(means: list[float], temperature: float) -> dict[tuple[int, int], float]:
    """P(i then j) = p_i p_j / (1 - p_i)."""
    p = eq1_probabilities(means, temperature)
    return {(i, j): p[i] * p[j] / (1 - p[i]) for i, j in permutations(range(len(means)), 2)}


def test_probabilities_by_hand() -> None:
    """Means 1 and 2 at tau = 1 / ln 3: the odds are e^(ln 3) = 3, so 1/4 and 3/4; at tau doubled sqrt(3) to 1."""
    assert eq1_probabilities([1.0, 2.0], 1 / math.log(3)) == pytest.approx([0.25, 0.75])
    assert eq1_probabilities([1.0, 2.0], 2 / math.log(3))[1] == pytest.approx(math.sqrt(3) / (1 + math.sqrt(3)))


@given(
    st.lists(st.floats(min_value=-1e4, max_value=1e4), min_size=1, max_size=8), st.floats(min_value=0.01, max_value=10)
)
def test_probabilities_sum_to_one_and_ignore_a_common_shift(means: list[float], temperature: float) -> None:
    """Eq. 1 subtracts the mean over buckets; that must not matter."""
    probabilities = eq1_probabilities(means, temperature)
    assert math.fsum(probabilities) == pytest.approx(1)
    middle = math.fsum(means) / len(means)
    assert eq1_probabilities([mean - middle for mean in means], temperature) == pytest.approx(probabilities, abs=1e-6)


def test_two_bucket_draw_matches_the_closed_form() -> None:
    means, draws, rng = [0.55, 1.04, 1.25, 2.05], 200_000, Random(20)
    counts = Counter(tuple(draw_distinct(means, 2, 0.5, rng)) for _ in range(draws))
    expected = closed_form(means, 0.5)
    assert chi_squared(counts, expected, draws) < chi_squared_limit(len(expected) - 1)


def test_the_bound_sees_a_slightly_wrong_temperature() -> None:
    """The test above can fail: a temperature wrong by 3 % exceeds its bound."""
    means, draws, rng = [0.55, 1.04, 1.25, 2.05], 200_000, Random(20)
    counts = Counter(tuple(draw_distinct(means, 2, 0.515, rng)) for _ in range(draws))
    expected = closed_form(means, 0.5)
    assert chi_squared(counts, expected, draws) > chi_squared_limit(len(expected) - 1)


@pytest.mark.slow
def test_ten_million_draws_match_the_closed_form() -> None:
    means, draws, rng = [0.9, 1.3, 1.7], 10_000_000, Random(7)
    counts = Counter(tuple(draw_distinct(means, 2, 0.5, rng)) for _ in range(draws))
    expected = closed_form(means, 0.5)
    assert chi_squared(counts, expected, draws) < chi_squared_limit(len(expected) - 1)


def test_places_within_a_bucket_are_uniform() -> None:
    draws, rng, strategy = 60_000, Random(3), Buckets(0.5)
    places: Counter = Counter()
    for _ in range(draws):
        places.update(pick.place for pick in strategy.choose(SHELF, 2, rng) if pick.bucket == 10)
    total = sum(places.values())
    assert chi_squared(places, dict.fromkeys(range(10), 0.1), total) < chi_squared_limit(9)


def test_random_draws_each_pair_of_exemplars_equally_often() -> None:
    """Buckets of 3 and 1 hold four exemplars: each of the 12 ordered pairs has 1/12, also two of one bucket."""
    shelf, draws, rng = [Bucket(5, 3, 0.5), Bucket(9, 1, 0.9)], 60_000, Random(5)
    counts = Counter(tuple(Uniform().choose(shelf, 2, rng)) for _ in range(draws))
    everyone = [Pick(5, 0), Pick(5, 1), Pick(5, 2), Pick(9, 0)]
    assert chi_squared(counts, dict.fromkeys(permutations(everyone, 2), 1 / 12), draws) < chi_squared_limit(11)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.floats(0.1, 1e6)), max_size=6), st.integers(0, 8), st.integers(),
    st.sampled_from(["buckets", "random", "none"]),
)  # fmt: skip
def test_picks_are_different_and_exist(sizes: list[tuple[int, float]], count: int, seed: int, name: str) -> None:
    shelf = [Bucket(index, size, mean) for index, (size, mean) in enumerate(sizes)]
    picks = create_strategy(name, 0.5).choose(shelf, count, Random(seed))
    assert len(set(picks)) == len(picks) <= count
    assert all(pick.place < shelf[pick.bucket].count for pick in picks)
    if name == "buckets":
        assert len({pick.bucket for pick in picks}) == min(count, len(shelf))
    if name == "random":
        assert len(picks) == min(count, sum(bucket.count for bucket in shelf))


def test_a_cold_start_shows_what_there_is() -> None:
    assert Buckets(0.5).choose([], 2, Random(0)) == []
    assert len(Buckets(0.5).choose([Bucket(10, 9, 1.05)], 2, Random(0))) == 1
    assert Nothing().choose(SHELF, 2, Random(0)) == []


def test_a_certain_first_bucket_leaves_a_proper_second_draw() -> None:
    """exp(-1e6) is 0 in floating point: P(first) is exactly 1, and the other two still share the second draw."""
    seconds = Counter(draw_distinct([1.0, 1.0, 5e5], 2, 0.5, Random(seed))[1] for seed in range(200))
    assert set(seconds) == {0, 1}
