"""64 rollout clients and 64 writers on one server for minutes: no error, both ledgers exact."""

from __future__ import annotations

import os

import pytest

from tests.bench.store_soak import soak

SECONDS = float(os.environ.get("KONTRAST_SOAK_S", "300"))


def test_a_few_clients_leave_exact_ledgers() -> None:
    outcome = soak(2.0, 2, 4)
    assert outcome.problems == []
    assert min(outcome.counts[name] for name in ("draws", "groups", "accepted", "rejected", "cancelled")) > 0


@pytest.mark.slow
def test_128_clients_leave_exact_ledgers() -> None:
    outcome = soak(SECONDS, 4, 16)
    print(dict(outcome.counts))
    assert outcome.problems == []
    assert outcome.counts["draws"] > 100
