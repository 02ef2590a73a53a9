"""Frozen weights: merged, packed or skipped parameters that ignore a later load_state_dict.

Governs the calls after the parameters were changed in place by load_state_dict, to random values for all of them,
once or more in the check and once at a random turn of the timing (`Facts.draws` with `reloaded`). With `weights =
seeded` they do not decide. The fault itself is the comparison's; a candidate that cannot take the reference's
parameters (`Facts.parameters_missing`) would evade it, and yields `contract`.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import DrawTally, Facts
from evaluator.judgement.rules import Rules


def _find(facts: Facts, rules: Rules) -> list[Fault]:
    missing = facts.parameters_missing
    if rules.weights != "loaded" or not missing:
        return []
    names = ", ".join(missing[:5]) + (" and others" if len(missing) > 5 else "")
    message = (
        f"ModelNew does not take the reference's parameters ({names}): keep their names, or their order, with dtypes "
        "and shapes; these rules load them."
    )
    return [Fault("contract", "load", message, {"missing": list(missing)})]


def _governs(tally: DrawTally) -> bool:
    return tally.reloaded


DEFENCE = Defence(
    "parameter_tracking", "replay and caching", ("draws", "parameters_missing"), _find, governs=_governs,
    active="parameters change between calls",
    yields=("contract",), forgiven="weights",
)  # fmt: skip
