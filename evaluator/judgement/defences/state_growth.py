"""Hoarding: memory that grows with the calls, as result banks do.

Rests on `Facts.growth`, counted after the first call, constant work space being free. Yields `resource_abuse` over
max(`growth_bytes`, `growth_calls` x bytes of one call) for memory that still grows after two dozen calls, and over four
times that at once: resident memory also holds what the C allocator keeps for reuse, which levels off. `MemoryLog` makes
the facts.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import MIB, Rules

LEVEL_CALLS = 24
"""Calls after which an allocator's own reserves have levelled off."""
RECENT_CALLS = 8
NOISE_BYTES = 16 * MIB
AT_ONCE = 4
"""Multiple of the allowed growth that needs no look at how it develops."""


def allowed_bytes(bytes_per_call: int, rules: Rules) -> int:
    """Growth that the rules allow after the first call, in bytes."""
    return max(rules.growth_bytes, int(rules.growth_calls * bytes_per_call))


class MemoryLog:
    """Readings of a worker's private memory after bursts of calls; the first reading is the base."""

    def __init__(self) -> None:
        self._readings: list[tuple[int, int]] = []

    def add(self, memory_bytes: int, calls: int) -> None:
        """Notes the memory after `calls` more calls."""
        before = self._readings[-1][0] if self._readings else -calls
        self._readings.append((before + calls, memory_bytes))

    @property
    def grown_bytes(self) -> int:
        """Largest growth over the base so far."""
        return max((memory for _, memory in self._readings), default=0) - self._base if self._readings else 0

    @property
    def calls(self) -> int:
        """Calls since the base was read."""
        return self._readings[-1][0] if self._readings else 0

    @property
    def still_growing(self) -> bool:
        """Whether the last eight calls raised the maximum; True while there are too few calls to tell."""
        if self.calls < LEVEL_CALLS:
            return True
        early = [memory for count, memory in self._readings if count <= self.calls - RECENT_CALLS]
        return self.grown_bytes > max(early) - self._base + NOISE_BYTES

    @property
    def _base(self) -> int:
        return self._readings[0][1]


def _find(facts: Facts, rules: Rules) -> list[Fault]:
    seen = facts.growth
    allowed = allowed_bytes(seen.bytes_per_call, rules)
    settled = seen.calls >= LEVEL_CALLS
    for place, grown in (("host", seen.host_bytes), ("device", seen.device_bytes)):
        if grown > AT_ONCE * allowed or (grown > allowed and settled and seen.still_growing):
            message = (
                f"{place.capitalize()} memory grew by {grown // MIB} MiB over {seen.calls} calls; "
                f"{allowed // MIB} MiB are allowed."
            )
            return [Fault("resource_abuse", facts.step, message, {**seen.model_dump(mode="json"), "allowed": allowed})]
    return []


DEFENCE = Defence(
    "state_growth", "resource abuse", ("growth",), _find,
    yields=("resource_abuse",), softened=("growth_bytes", "growth_calls"),
)  # fmt: skip
