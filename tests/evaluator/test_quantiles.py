"""Student's t quantile against printed tables."""

from __future__ import annotations

import pytest

from evaluator.timing.quantiles import t_quantile

TABLE = [
    (0.975, 1, 12.7062), (0.975, 4, 2.7764), (0.99, 4, 3.7469), (0.99, 6, 3.1427), (0.99, 19, 2.5395),
    (0.95, 30, 1.6973), (0.995, 10, 3.1693), (0.99, 120, 2.3578), (0.99, 5000, 2.3263), (0.5, 7, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("probability", "degrees", "value"), TABLE)
def test_printed_tables(probability: float, degrees: float, value: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(value, abs=2e-3 if degrees > 1000 else 1e-4)


def test_fractional_degrees_lie_between() -> None:
    assert t_quantile(0.99, 5) < t_quantile(0.99, 4.5) < t_quantile(0.99, 4)


@pytest.mark.parametrize(("probability", "degrees"), [(0.4, 5), (1.0, 5), (0.99, 0.5)])
def test_outside_its_range_it_raises(probability: float, degrees: float) -> None:
    with pytest.raises(ValueError, match="no t quantile"):
        t_quantile(probability, degrees)
