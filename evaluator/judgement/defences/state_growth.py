"""Hoarding: memory that grows with the calls, as result banks do.

Rests on `Facts.growth`, counted after the first call, constant work space being free. Yields `resource_abuse` over
max(`growth_bytes`, `growth_calls` x bytes of one call).
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import MIB, Rules


def allowed_bytes(bytes_per_call: int, rules: Rules) -> int:
    """Growth that the rules allow after the first call, in bytes."""
    return max(rules.growth_bytes, int(rules.growth_calls * bytes_per_call))


def _find(facts: Facts, rules: Rules) -> list[Fault]:
    seen = facts.growth
    allowed = allowed_bytes(seen.bytes_per_call, rules)
    for place, grown in (("host", seen.host_bytes), ("device", seen.device_bytes)):
        if grown > allowed:
            message = (
                f"{place.capitalize()} memory grew by {grown // MIB} MiB over {seen.calls} calls; "
                f"{allowed // MIB} MiB are allowed."
            )
            return [Fault("resource_abuse", facts.step, message, {**seen.model_dump(mode="json"), "allowed": allowed})]
    return []


DEFENCE = Defence("state_growth", "resource abuse", ("growth",), _find)
