"""Sampler shortcuts: code that is right only for the inputs that get_inputs happens to draw.

Governs the calls whose inputs are shifted, scaled, sign-flipped or small integers (`Facts.draws` of those kinds), where
the reference stays finite; with `domain = drawn` they do not decide. The fault itself is the comparison's.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence
from evaluator.judgement.facts import DrawTally


def _governs(tally: DrawTally) -> bool:
    return tally.kind != "as_given"


DEFENCE = Defence(
    "whole_domain", "special inputs", ("draws",), governs=_governs, active="draws beyond get_inputs",
    forgiven="domain",
)  # fmt: skip
