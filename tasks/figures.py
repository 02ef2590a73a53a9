"""How numbers are written for people, in every message, panel and table: three significant figures, zeros kept.

Invariant: equal kinds of numbers look alike, `1.00x` beside `1.30x`; records and JSON keep the numbers themselves.
"""

from __future__ import annotations

import math


def figures(value: float) -> str:
    """`1.00`, `0.950`, `12.3`, `1234`, `1.20e-07`: three figures, whole digits never dropped."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exponent = int(f"{value:.2e}".partition("e")[2])
    if not -4 <= exponent < 9:
        return f"{value:.2e}"
    return f"{value:.{max(0, 2 - exponent)}f}"


def times(ratio: float) -> str:
    """A speedup: `1.22x`."""
    return f"{figures(ratio)}x"


def interval(low: float, high: float) -> str:
    """`1.18 to 1.27`."""
    return f"{figures(low)} to {figures(high)}"


def milliseconds(value: float) -> str:
    """A time given in milliseconds: `2.50 ms`, below one `101 us`."""
    return f"{figures(value)} ms" if value >= 1 else f"{figures(1000 * value)} us"
