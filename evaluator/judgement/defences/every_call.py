"""Phase detection: right while it is checked, wrong while it is timed.

Governs the calls of timed turns and of the confirmation (`Facts.draws` of steps `time` and `confirm`): each of them is
compared, and they look like any other call from within. The fault itself is the comparison's.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence
from evaluator.judgement.facts import DrawTally


def _governs(tally: DrawTally) -> bool:
    return tally.step in ("time", "confirm")


DEFENCE = Defence("every_call", "phase detection", ("draws",), governs=_governs, active="timed outputs are compared")
