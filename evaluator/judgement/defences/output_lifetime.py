"""Reused results: an output buffer that is handed out again while the caller still holds the earlier result.

Rests on `Facts.aliases` with target `earlier_output` (results that the evaluator holds on purpose) and on
`Facts.earlier_result_changed`. Yields `aliasing` when a result belongs to the caller; under `next_call` it is the label
`static_output`.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import Rules

_MESSAGE = "A result of an earlier call, still held by the caller, was handed out or changed again by a later call."


def reuses_output(facts: Facts) -> bool:
    """Whether a later call returned or changed the memory of an earlier result."""
    return facts.earlier_result_changed or any(
        alias.target == "earlier_output" and not alias.reference_too for alias in facts.aliases
    )


def _find(facts: Facts, rules: Rules) -> list[Fault]:
    if rules.output_lifetime != "caller" or not reuses_output(facts):
        return []
    aliases = [alias.model_dump(mode="json") for alias in facts.aliases if alias.target == "earlier_output"]
    return [Fault("aliasing", "check", _MESSAGE, {"aliases": aliases, "changed": facts.earlier_result_changed})]


DEFENCE = Defence(
    "output_lifetime",
    "shape and aliasing",
    ("aliases", "earlier_result_changed"),
    _find,
    active="earlier results are held during the check",
    yields=("aliasing",),
    forgiven="output_lifetime",
)
