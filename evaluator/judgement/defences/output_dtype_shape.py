"""Shape and type tricks: an output that a forgiving comparison would broadcast or convert.

Rests on `Facts.outputs`. Yields `incorrect` when the tree of outputs, a shape or a dtype is not the reference's. With
`precision = as_given` another floating dtype is accepted.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import ExpectedLeaf, Facts, LeafFacts, OutputFacts
from evaluator.judgement.rules import Rules

FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})


def _difference(output: OutputFacts, rules: Rules) -> tuple[str, dict[str, object]]:
    """What differs, as a sentence with its evidence; an empty sentence for equal trees."""
    if output.structure != output.expected_structure:
        text = f"The output is {output.structure} where the reference returns {output.expected_structure}."
        return text, {"structure": output.structure, "expected_structure": output.expected_structure}
    expected = {leaf.path: leaf for leaf in output.expected}
    for leaf in output.leaves:
        wanted = expected.get(leaf.path)
        if wanted is not None and (text := _leaf_difference(leaf, wanted, rules)):
            return text, {"leaf": leaf.model_dump(mode="json"), "expected": wanted.model_dump(mode="json")}
    return "", {}


def _leaf_difference(leaf: LeafFacts, wanted: ExpectedLeaf, rules: Rules) -> str:
    if leaf.shape != wanted.shape:
        return f"Output {leaf.path} has shape {list(leaf.shape)}, the reference's has {list(wanted.shape)}."
    if leaf.dtype != wanted.dtype:
        both_floating = leaf.dtype in FLOATING and wanted.dtype in FLOATING
        if not (rules.precision == "as_given" and both_floating):
            return f"Output {leaf.path} is {leaf.dtype}, the reference's is {wanted.dtype}."
    return ""


def _find(facts: Facts, rules: Rules) -> list[Fault]:
    faults = []
    for output in facts.outputs:
        text, evidence = _difference(output, rules)
        if text:
            faults.append(Fault("incorrect", "check", text, dict(evidence)))
    return faults


DEFENCE = Defence(
    "output_dtype_shape", "shape and type", ("outputs",), _find,
    yields=("incorrect",), softened=("precision=as_given",),
)  # fmt: skip
