"""Two clocks: the arm's native timer, precise but forgeable, and the judge's own, which the arm cannot shorten.

What the judge sees of a turn is its native burst plus what both arms pay alike: waking, reading the request, delivering
the results, stopping. Times are nanoseconds; pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from evaluator.timing.statistics import Order, Pair

TARGET_NS = 8e6
"""Length of a burst, so that waking and stopping stay small beside it."""
MAX_SLOTS = 16
DEVICE_SLOTS = 6
"""Calls of a turn on an accelerator, at most: its clock resolves a single call to 0.3 % (docs/measurements/
evaluator-cuda), and to draw, deliver and compare a call takes longer than the call."""
LONG_CALL_MS = 2.0
"""A longer call's burst on an accelerator is two calls."""
SHORT_CALL_MS = 0.02
"""A shorter one's is up to `MAX_SLOTS`: it differs by a tenth from one to the next."""
STOLEN_SHARE = 0.05
DISTURBED = "others ran on the arms' core"
"""Why a pair is discarded: as a whole, whichever arm was disturbed."""
_SURE_PAIRS = 20
MOST_LEAD_NS = 1_000_000
"""Longest lead of a device's clock; what takes longer to launch is timed with the rest of its launch."""


@dataclass(frozen=True)
class ArmTurn:
    """One turn of one arm: its K + 1 clock readings (first call included) and the judge's span."""

    stamps_ns: tuple[int, ...]
    span_ns: int
    ran_ns: int = 0
    waited_ns: int = 0

    @property
    def calls(self) -> int:
        return len(self.stamps_ns) - 1

    @property
    def burst_ns(self) -> int:
        """All calls."""
        return self.stamps_ns[-1] - self.stamps_ns[0]

    @property
    def counted_ns(self) -> int:
        """The calls after the first; all of a turn of one call."""
        return self.stamps_ns[-1] - self.stamps_ns[1 if self.calls > 1 else 0]

    def shown_ns(self, cores: int) -> float:
        """What the judge's own clock shows of the turn, which the arm cannot shorten.

        On one core that is the processor time that the kernel counted for all of the arm's threads: it holds every
        piece of work, and neither the judge's own delays nor others' work. On several it is the span without the time
        that others took. On none, where the work is an accelerator's and no account of the processor's holds it, it
        is the whole span: an arm whose threads wait for each other would shorten anything else.
        """
        if cores == 0:
            return float(self.span_ns)
        if cores == 1:
            return float(self.ran_ns)
        return float(self.span_ns - max(0, min(self.waited_ns, self.span_ns - self.ran_ns)))

    @property
    def possible(self) -> bool:
        """Whether the readings grow and fit into the span."""
        steps = zip(self.stamps_ns, self.stamps_ns[1:], strict=False)
        return all(before < after for before, after in steps) and self.burst_ns <= self.span_ns


def pair_of(
    reference: ArmTurn,
    candidate: ArmTurn,
    placement: int,
    order: Order,
    *,
    cores: int = 1,
    lead_ns: int = 0,
    spoiled: str = "",
) -> Pair:
    """The two turns as the statistics take them.

    A candidate whose readings are impossible is passed on as such: with times that are no times.
    """
    believed = candidate.possible
    return Pair(
        placement=placement, order=order, calls=max(1, reference.calls - 1), reference_ns=reference.counted_ns,
        candidate_ns=candidate.counted_ns if believed else math.nan, reference_burst_ns=reference.burst_ns,
        candidate_burst_ns=candidate.burst_ns if believed else math.nan, reference_span_ns=reference.shown_ns(cores),
        candidate_span_ns=candidate.shown_ns(cores), lead_ns=lead_ns, spoiled=spoiled if believed else "",
    )  # fmt: skip


class Disturbances:
    """Notices turns in which others ran on the arms' core during the burst, by the kernel's accounts.

    What a turn runs beside its burst is known from the reference arm; a burst that is longer than what its arm ran, by
    a time that its threads spent waiting for the processor, was interrupted. A candidate cannot bring that about: its
    own threads that wait for each other run all the time, one that sleeps does not wait.
    """

    def __init__(self) -> None:
        self._beside: list[float] = []
        self._pairs = 0
        self._found = 0

    def of(self, reference: ArmTurn, candidate: ArmTurn) -> str:
        """Why the pair is to be discarded; empty for a good one. At most every second pair, after the first twenty."""
        self._pairs += 1
        self._beside.append((reference.ran_ns - reference.burst_ns) / reference.calls)
        beside = sorted(self._beside)[(3 * len(self._beside)) // 4]
        disturbed = any(self._off_ns(turn, beside) > STOLEN_SHARE * turn.burst_ns for turn in (reference, candidate))
        if not disturbed or self._found >= _SURE_PAIRS + self._pairs // 2:
            return ""
        self._found += 1
        return DISTURBED

    def _off_ns(self, turn: ArmTurn, beside_ns: float) -> float:
        return min(float(turn.waited_ns), turn.burst_ns - (turn.ran_ns - beside_ns * turn.calls))


def calls_per_turn(call_ns: float, slots: int) -> tuple[int, int]:
    """Smallest and largest number of calls of a turn whose arms take `call_ns` each.

    About 8 ms a turn within the arena's slots; at least two, since the first call is dropped. Where the slots are what
    limits it the number still varies, so that no call is known to be the last.
    """
    wanted = TARGET_NS / max(call_ns, 1.0)
    most = max(2, min(slots, math.ceil(1.5 * wanted)))
    return max(2, math.floor(0.75 * min(most, wanted))), most


def slots_on_device(bytes_per_call: int, leaves: int, free_bytes: int, call_ms: float) -> int:
    """The same on an accelerator: 6 (16 for very short calls), two for calls over 2 ms, 0 when not even two fit.

    Seven copies exist at once: three of the inputs, four of the outputs, counted in full, in half of the free memory.
    """
    each = max(1, 7 * bytes_per_call)
    if 2 * each > free_bytes // 2:
        return 0
    if call_ms > LONG_CALL_MS:
        return 2
    wanted = min(MAX_SLOTS if call_ms < SHORT_CALL_MS else DEVICE_SLOTS, 256 // max(1, leaves))
    return int(max(2, min(wanted, free_bytes // 2 // each)))


def slots_for(bytes_per_call: int, leaves: int, free_bytes: int) -> int:
    """How many calls' inputs and outputs the arenas hold: 0 when not even two fit.

    Five copies exist at once (two of the inputs, three of the outputs, counted in full), in a quarter of the free
    memory; beyond two slots at most 256 MiB are spent.
    """
    share = free_bytes // 4
    each = max(1, 3 * bytes_per_call)
    if 2 * each > share:
        return 0
    wanted = min(MAX_SLOTS, 256 // max(1, leaves), max(2, (256 << 20) // each))
    return int(max(2, min(wanted, share // each)))
