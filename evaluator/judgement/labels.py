"""Labels: what a candidate is, apart from whether it is right.

Invariant: labels follow from facts; no label rejects anything, and training may read them.
"""

from __future__ import annotations

from evaluator.judgement.defences.fallback import fallback_kinds
from evaluator.judgement.defences.output_lifetime import reuses_output
from evaluator.judgement.facts import Facts

CUSTOM_SHARE = 0.5
"""Share of device time above which the candidate's own kernels name it."""


def labels_of(facts: Facts) -> tuple[str, ...]:
    """All labels of the candidate, sorted."""
    work = facts.own_work
    found = {
        "same_formula": facts.screen.same_formula or (work.operators_equal and _all_bit_equal(facts)),
        "compiler_wrapper": bool(work.compilers),
        "fallback": bool(fallback_kinds(work)),
        "static_output": reuses_output(facts),
        "init_folded_weights": _folds_weights(facts),
        "half": facts.reduced_precision or any(tally.half_like for tally in facts.draws),
        "flags": bool(facts.global_state.settings),
        "graph": facts.captured_graph,
        "custom_kernel": bool(work.kernels_called) or (work.custom_share or 0.0) >= CUSTOM_SHARE,
        "library": _is_library(facts),
        "copy": bool(facts.copy_of),
        "degenerate_task": facts.degenerate.task,
        "random_reference": facts.random_reference,
        "span_limited": facts.span_limited,
        "seeded_weights": facts.parameters == "seeded",
    }
    return tuple(sorted(name for name, holds in found.items() if holds))


def _folds_weights(facts: Facts) -> bool:
    """Right until the parameters change, then right for the old ones."""
    before = [tally for tally in facts.draws if not tally.reloaded]
    after = [tally for tally in facts.draws if tally.reloaded and tally.kind == "as_given"]
    was_right = bool(before) and not any(tally.wrong for tally in before)
    return was_right and any(tally.wrong.get("stale") for tally in after)


def _all_bit_equal(facts: Facts) -> bool:
    return bool(facts.draws) and all(tally.bit_equal == tally.calls for tally in facts.draws)


def _is_library(facts: Facts) -> bool:
    """Operators of PyTorch and no kernel of its own did the work."""
    work = facts.own_work
    if work.library_share is not None:
        return work.library_share >= CUSTOM_SHARE
    return work.kernels_called == 0 or (work.kernels_called is None and not facts.compile.routes)
