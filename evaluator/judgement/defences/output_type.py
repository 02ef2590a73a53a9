"""Deferred work: an output that is not yet a plain tensor with memory of its own.

Rests on `Facts.outputs`, read natively in the worker: the exact type, the instance's attributes, the layout, the device
and the bytes of the storage. Yields `lazy_output` for tensor subclasses, for tensors whose instance carries attributes
(methods shadowed to compute at first use), for missing or too small storage, and for results left on another device.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts, LeafFacts
from evaluator.judgement.rules import Rules


def laziness(leaf: LeafFacts, expected_device: str | None = None) -> str:
    """Why the leaf is not a finished plain value, as the end of a sentence; empty for a finished one."""
    if not leaf.plain:
        return f"is a {leaf.type_name}, not a plain torch.Tensor"
    if leaf.attributes:
        return f"carries {leaf.attributes} attribute(s) on the tensor object itself"
    if leaf.layout != "strided":
        return f"has layout {leaf.layout}, not strided"
    if expected_device is not None and leaf.device != expected_device:
        return f"lies on {leaf.device}, where the reference's lies on {expected_device}"
    if leaf.storage_bytes < leaf.needed_bytes:
        return f"has {leaf.storage_bytes} bytes of storage where its shape needs {leaf.needed_bytes}"
    return ""


def _find(facts: Facts, rules: Rules) -> list[Fault]:  # noqa: ARG001
    faults = []
    for output in facts.outputs:
        devices = {leaf.path: leaf.device for leaf in output.expected}
        for leaf in output.leaves:
            why = laziness(leaf, devices.get(leaf.path))
            if why:
                message = f"Output {leaf.path} {why}; return a computed torch.Tensor."
                faults.append(Fault("lazy_output", "check", message, {"leaf": leaf.model_dump(mode="json")}))
    return faults


DEFENCE = Defence("output_type", "deferred work", ("outputs",), _find, yields=("lazy_output",))
