"""The device's state beside the turns: clocks, throttling, power, temperature; pure.

Invariants: a pair is discarded as a whole and by a rule that was fixed before, whichever arm it would have helped; what
was read is summed up in the measurement.
"""

from __future__ import annotations

import statistics
from typing import Any

THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
"""Hardware slowdown, software and hardware thermal slowdown, power brake (bits of NVML's clock event reasons). The
software power cap (0x4) is how a device that runs heavy matrix work normally ends up, and is only reported."""
SPOILED = "the device was throttled"

Reading = dict[str, float]


def spoiled(reading: Reading) -> str:
    """Why the pair beside this reading is discarded; empty for a good one."""
    return SPOILED if int(reading.get("reasons", 0)) & THROTTLED else ""


def summary(readings: list[Reading]) -> dict[str, Any]:
    """Lowest, middle and highest clock, and the highest of the others, for `Measurement.clocks`."""
    found: dict[str, Any] = {}
    for name in ("sm_mhz", "memory_mhz"):
        values = [reading[name] for reading in readings if name in reading]
        if values:
            found[name] = [min(values), statistics.median(values), max(values)]
    for name in ("power_w", "temperature_c"):
        values = [reading[name] for reading in readings if name in reading]
        if values:
            found[f"{name}_max"] = max(values)
    masks = [int(reading["reasons"]) for reading in readings if "reasons" in reading]
    if masks:
        found["reasons"] = f"{_either(masks):#x}"
    return found


def _either(masks: list[int]) -> int:
    result = 0
    for mask in masks:
        result |= mask
    return result
