"""One module for each defence; `ALL_DEFENCES` are their names, `DEFENCES` the defences by name.

Invariant: a defence that is not in the set of names that are on neither finds nor governs anything; what the evaluator
does actively for a defence (its `active`) is skipped as well, so that its removal is visible in a test.
"""

from __future__ import annotations

from evaluator.judgement.defences import (
    aliasing,
    channel_schema,
    compile_wrapper,
    confirmation,
    degenerate_task,
    determinism,
    early_exit,
    error_budget,
    every_call,
    fallback,
    global_state,
    guard_bands,
    input_mutation,
    nan_masks,
    output_dtype_shape,
    output_lifetime,
    output_type,
    parameter_tracking,
    pending_work,
    stale_result,
    state_growth,
    stream_escape,
    timer_disagreement,
    whole_domain,
)
from evaluator.judgement.defences.base import Defence, Fault

_MODULES = (
    output_type, output_dtype_shape, aliasing, output_lifetime, input_mutation, guard_bands, nan_masks, error_budget,
    stale_result, whole_domain, parameter_tracking, every_call, determinism, degenerate_task, state_growth,
    pending_work, stream_escape, timer_disagreement, channel_schema, early_exit, global_state, compile_wrapper,
    fallback, confirmation,
)  # fmt: skip

DEFENCES: dict[str, Defence] = {module.DEFENCE.name: module.DEFENCE for module in _MODULES}
ALL_DEFENCES: tuple[str, ...] = tuple(DEFENCES)

__all__ = ["ALL_DEFENCES", "DEFENCES", "Defence", "Fault"]
