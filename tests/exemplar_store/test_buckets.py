"""Which bucket a speedup falls into, and that the bounds agree with it."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exemplar_store.buckets import Bucket, Bucketing, read_stats
from exemplar_store.errors import StoreUsageError
from exemplar_store.keys import Shelf


@pytest.mark.parametrize(
    ("speedup", "index"),
    [(0.05, 0), (0.1, 1), (0.99, 9), (1.0, 10), (1.09, 10), (1.1, 11), (1.2, 12), (2.5, 25), (120.0, 1200)],
)
def test_linear_buckets_are_half_open(speedup: float, index: int) -> None:
    """Width 0.1: bucket k holds [0.1 k, 0.1 (k + 1)), so 1.0 is the first of bucket 10 and 1.1 of bucket 11."""
    assert Bucketing("linear", 0.1).index(speedup) == index


@pytest.mark.parametrize(("speedup", "index"), [(1.0, 0), (1.99, 0), (2.0, 1), (4.5, 2), (0.5, -1), (0.4, -2)])
def test_log_buckets_double(speedup: float, index: int) -> None:
    """Width ln 2: bucket k holds [2^k, 2^(k+1)); 0.4 lies in [0.25, 0.5), bucket -2."""
    assert Bucketing("log", math.log(2)).index(speedup) == index


@given(
    st.floats(min_value=1e-6, max_value=1e6),
    st.sampled_from(["linear", "log"]),
    st.floats(min_value=1e-3, max_value=50),
)
def test_a_speedup_lies_within_its_bucket(speedup: float, scale: Literal["linear", "log"], width: float) -> None:
    bucketing = Bucketing(scale, width)
    index = bucketing.index(speedup)
    assert bucketing.low(index) <= speedup < bucketing.high(index)


@given(st.integers(min_value=0, max_value=10**6), st.floats(min_value=1e-3, max_value=50))
def test_an_edge_belongs_to_the_upper_bucket(index: int, width: float) -> None:
    bucketing = Bucketing("linear", width)
    if index:
        assert bucketing.index(bucketing.low(index)) == index
        assert bucketing.index(math.nextafter(bucketing.low(index), 0)) == index - 1


@pytest.mark.parametrize("speedup", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_speedup_is_refused(speedup: float) -> None:
    with pytest.raises(StoreUsageError, match="positive number"):
        Bucketing().index(speedup)


def test_stats_give_counts_and_means_by_shelf_and_skip_empty_buckets() -> None:
    """Two exemplars with micro-scores 1,500,000 and 1,540,000 have mean (3.04 / 2) = 1.52."""
    fields = {
        b"seq": b"7", b"cpu|fp32|reward|15|n": b"2", b"cpu|fp32|reward|15|s": b"3040000", b"cpu|fp32|reward|-2|n": b"1",
        b"cpu|fp32|reward|-2|s": b"-150000", b"H100|fp32|reward|3|n": b"0", b"H100|fp32|reward|3|s": b"0",
    }  # fmt: skip
    assert read_stats(fields) == {Shelf("cpu", "fp32", "reward"): [Bucket(-2, 1, -0.15), Bucket(15, 2, 1.52)]}
