"""Aliasing: an output whose memory is an input, a parameter, another output or folded onto itself.

Rests on `Facts.aliases` (overlaps of byte ranges) and on the strides in `Facts.outputs`. Yields `aliasing`, except
where the reference's output aliases the same thing. Earlier results are `output_lifetime`'s. `overlapping` and
`self_overlapping` are the arithmetic behind the facts.
"""

from __future__ import annotations

from collections.abc import Sequence

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import Rules


def overlapping(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether two byte ranges (start, end; end excluded) share a byte; empty ranges share none."""
    return max(first[0], second[0]) < min(first[1], second[1])


def self_overlapping(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two different indices reach the same element, or the strides leave that open.

    Sorted by stride, each dimension has to step over everything that the smaller ones reach. That is exact for what
    transposing, permuting and slicing produce, and refuses the rare interleaved layouts made by as_strided.
    """
    reach = 0
    if 0 in shape:
        return False
    for step, length in sorted((abs(step), length) for step, length in zip(stride, shape, strict=True) if length > 1):
        if step <= reach:
            return True
        reach += step * (length - 1)
    return False


def _find(facts: Facts, rules: Rules) -> list[Fault]:  # noqa: ARG001
    faults = []
    for alias in facts.aliases:
        if alias.target == "earlier_output" or alias.reference_too:
            continue
        what = {"input": "an input", "parameter": "a parameter", "sibling_output": "another output"}[alias.target]
        message = f"Output {alias.path} shares memory with {what} ({alias.other or 'unnamed'}); return a new tensor."
        faults.append(Fault("aliasing", "check", message, alias.model_dump(mode="json")))
    for output in facts.outputs:
        for leaf in output.leaves:
            if self_overlapping(leaf.shape, leaf.stride[: len(leaf.shape)] or (1,) * len(leaf.shape)):
                message = (
                    f"Output {leaf.path} with shape {list(leaf.shape)} and strides {list(leaf.stride)} is not dense: "
                    "several elements share memory."
                )
                faults.append(Fault("aliasing", "check", message, {"leaf": leaf.model_dump(mode="json")}))
    return faults


DEFENCE = Defence("aliasing", "shape and aliasing", ("aliases", "outputs"), _find, yields=("aliasing",))
