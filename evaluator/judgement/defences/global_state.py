"""Sabotage of shared state: replaced functions of torch, time, json and the like.

Rests on `Facts.global_state`, a comparison of identities in the worker at rest. It is a tripwire only: the clock, the
comparison and the reference live in other processes, so that nothing depends on its silence. Yields `tampering` for
replaced functions. Settings that differ at rest harm nobody else and are the label `flags`.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import Rules


def _find(facts: Facts, rules: Rules) -> list[Fault]:  # noqa: ARG001
    replaced = facts.global_state.replaced
    if not replaced:
        return []
    names = ", ".join(replaced[:5]) + (" and others" if len(replaced) > 5 else "")
    message = f"The candidate replaced functions that are not its own: {names}."
    return [Fault("tampering", facts.step, message, {"replaced": list(replaced)})]


DEFENCE = Defence("global_state", "sabotage", ("global_state",), _find, yields=("tampering",))
