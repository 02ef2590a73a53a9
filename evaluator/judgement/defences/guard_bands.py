"""Writes out of bounds: a kernel that damages what lies behind or before its output.

Rests on `Facts.guards_broken`: secret patterns around the slots of inputs and outputs in the candidate's arenas,
compared after the call. Yields `incorrect`.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import Rules


def _find(facts: Facts, rules: Rules) -> list[Fault]:  # noqa: ARG001
    if not facts.guards_broken:
        return []
    where = ", ".join(facts.guards_broken)
    message = f"The candidate wrote outside its own tensors ({where}); check its bounds."
    return [Fault("incorrect", "check", message, {"guards": list(facts.guards_broken)})]


DEFENCE = Defence("guard_bands", "out of bounds", ("guards_broken",), _find, yields=("incorrect",))
