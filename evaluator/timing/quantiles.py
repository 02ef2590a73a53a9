"""Student's t quantile for fractional degrees of freedom, without a statistics package.

Golden values in the tests are those of printed tables.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

_NORMAL_FROM = 1000.0
"""Degrees of freedom from which the normal quantile is equal to three digits."""
_SMALL = 1e-300


@lru_cache(maxsize=4096)
def t_quantile(probability: float, degrees: float) -> float:
    """The t value below which lies `probability` (0.5 to 1), for `degrees` >= 1; raises ValueError outside."""
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(f"no t quantile for probability {probability} and {degrees} degrees of freedom")
    if degrees >= _NORMAL_FROM:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1.0
    while _t_below(high, degrees) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if _t_below(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_below(t: float, degrees: float) -> float:
    """P(T <= t) for t >= 0."""
    x = degrees / (degrees + t * t)
    return 1 - _incomplete_beta(degrees / 2, 0.5, x) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function by its continued fraction."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    front = math.exp(log_front)
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, 1 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Lentz's evaluation of the continued fraction of the incomplete beta function."""
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / _away_from_zero(1 + even * d)
        c = _away_from_zero(1 + even / c)
        value *= d * c
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _away_from_zero(1 + odd * d)
        c = _away_from_zero(1 + odd / c)
        value *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _SMALL else _SMALL
