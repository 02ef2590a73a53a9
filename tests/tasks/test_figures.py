"""Numbers for people: three significant figures everywhere, and nowhere a format of one's own."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tasks.figures import figures, interval, milliseconds, times
from tasks.integrity import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
OWN_FORMAT = re.compile(r"\{[^{}]*:[^{}]*[.]\d+[fg]\}x|\.3g\} (?:ms|us|to\b)|[.]\d+f\} (?:ms|us|to\b)")
"""A speedup, a time or an interval that is formatted where it is printed."""
ELSEWHERE = {
    "rollout/prompt.py": "what policies were trained on",
    "evaluator/timing/controls.py": "a bias of a tenth of a percent has to show",
}


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1.00"), (1.3, "1.30"), (0.95, "0.950"), (9.996, "10.0"), (99.96, "100"), (123.4, "123"), (1234.4, "1234"),
     (0.00123, "0.00123"), (1.2e-7, "1.20e-07"), (0, "0"), (-2.5, "-2.50"), (math.inf, "inf"), (math.nan, "nan")],
)  # fmt: skip
def test_three_figures_and_their_zeros(value: float, text: str) -> None:
    assert figures(value) == text


def test_speedups_intervals_and_times() -> None:
    assert times(1.0) == "1.00x"
    assert interval(0.998, 1.2) == "0.998 to 1.20"
    assert [milliseconds(value) for value in (2.5, 0.1009, 0.004, 0.9996)] == [
        "2.50 ms",
        "101 us",
        "4.00 us",
        "1000 us",
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_place_formats_a_speedup_or_a_time_its_own_way(package: str) -> None:
    found = {
        str(file.relative_to(ROOT)): OWN_FORMAT.findall(file.read_text())
        for file in (ROOT / package).rglob("*.py")
        if OWN_FORMAT.search(file.read_text())
    }
    assert set(found) <= set(ELSEWHERE), found
