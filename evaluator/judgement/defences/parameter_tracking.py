"""Frozen weights: merged, packed or skipped parameters that ignore a later load_state_dict.

Governs the calls after the parameters were changed in place by load_state_dict, to random values for all of them,
once or more in the check and once at a random turn of the timing (`Facts.draws` with `reloaded`). With `weights =
seeded` they do not decide. The fault itself is the comparison's.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence
from evaluator.judgement.facts import DrawTally


def _governs(tally: DrawTally) -> bool:
    return tally.reloaded


DEFENCE = Defence(
    "parameter_tracking", "replay and caching", ("draws",), governs=_governs, active="parameters change between calls"
)
