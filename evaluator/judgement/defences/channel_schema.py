"""Forged messages: anything on the worker's channel that the fixed schema does not allow.

Rests on `Facts.channel_error`. Standard output is never read as a message, and an absent message is never a success.
Yields `forged_result`.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import Rules


def _find(facts: Facts, rules: Rules) -> list[Fault]:  # noqa: ARG001
    if not facts.channel_error:
        return []
    message = f"The worker's channel carried something that is not a message: {facts.channel_error}."
    return [Fault("forged_result", facts.step, message, {"channel": facts.channel_error})]


DEFENCE = Defence("channel_schema", "forged results", ("channel_error",), _find, yields=("forged_result",))
