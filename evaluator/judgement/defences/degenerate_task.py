"""Degenerate tasks: an output that hardly depends on the input, so that a constant passes.

Rests on `Facts.degenerate`, found by the adversaries at admission. Yields `constant_output` for a candidate whose
output is bit-equal over inputs where the reference's differs, or ignores a NaN in the input that the reference lets
through. The task stays runnable for candidates that compute.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import Rules


def _find(facts: Facts, rules: Rules) -> list[Fault]:  # noqa: ARG001
    seen = facts.degenerate
    if not seen.task or not (seen.output_repeats or seen.ignores_poison):
        return []
    how = "is the same bit for bit over different inputs" if seen.output_repeats else "does not depend on its inputs"
    message = f"The output {how}; this task's own output is nearly constant, and a constant earns nothing."
    return [Fault("constant_output", "check", message, seen.model_dump(mode="json"))]


DEFENCE = Defence(
    "degenerate_task", "constant output", ("degenerate",), _find, active="inputs with NaN on such tasks",
    yields=("constant_output",),
)  # fmt: skip
