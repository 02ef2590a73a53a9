"""Labels: what a candidate is, apart from whether it is right.

Invariant: labels follow from facts; no label rejects anything, and training may read them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from evaluator.judgement.defences.fallback import fallback_kinds
from evaluator.judgement.defences.output_lifetime import reuses_output
from evaluator.judgement.facts import Facts

CUSTOM_SHARE = 0.5
"""Share of device time above which the candidate's own kernels name it."""


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


class Label(NamedTuple):
    """When a label holds, and what it says."""

    holds: Callable[[Facts], bool]
    meaning: str


LABELS: dict[str, Label] = {
    "same_formula": Label(
        lambda facts: facts.screen.same_formula or (facts.own_work.operators_equal and _all_bit_equal(facts)),
        "The reference's own formula: its class body, or its operators with equal bits. A run caps its reward.",
    ),
    "compiler_wrapper": Label(
        lambda facts: bool(facts.own_work.compilers),
        "A wrapper (torch.compile, jit.script, jit.trace) did the work; `strict` rejects it as `fallback`.",
    ),
    "fallback": Label(
        lambda facts: bool(fallback_kinds(facts.own_work)),
        "The result is not its own kernel's; `strict` rejects it as `fallback`.",
    ),
    "static_output": Label(
        reuses_output, "It hands out one buffer again and again; `strict` rejects it as `aliasing`."
    ),
    "init_folded_weights": Label(
        _folds_weights, "It was right until the parameters changed: it folded them at construction."
    ),
    "half": Label(
        lambda facts: facts.reduced_precision or any(tally.half_like for tally in facts.draws),
        "Half precision or TF32 was seen in some of its work.",
    ),
    "flags": Label(
        lambda facts: bool(facts.global_state.settings), "It changed global settings of its process, such as threads."
    ),
    "graph": Label(lambda facts: facts.captured_graph, "It replays a CUDA graph."),
    "custom_kernel": Label(
        lambda facts: bool(facts.own_work.kernels_called) or (facts.own_work.custom_share or 0.0) >= CUSTOM_SHARE,
        "Kernels of its own run.",
    ),
    "library": Label(_is_library, "Operators of PyTorch do the work."),
    "copy": Label(lambda facts: bool(facts.copy_of), "Its normal form equals an exemplar that its prompt showed."),
    "degenerate_task": Label(
        lambda facts: facts.degenerate.task,
        "The task's output hardly depends on its input, so that a constant would nearly pass; reported apart.",
    ),
    "random_reference": Label(
        lambda facts: facts.random_reference, "The reference is random; it was compared with its random part off."
    ),
    "span_limited": Label(
        lambda facts: facts.span_limited, "The judge's clock shows less than the worker's; the score is what it shows."
    ),
    "seeded_weights": Label(
        lambda facts: facts.parameters == "seeded", "Its parameters were equal by seed and could not be changed."
    ),
}
"""Labels by name; `docs/labels.md` is made of their meanings."""


def labels_of(facts: Facts) -> tuple[str, ...]:
    """All labels of the candidate, sorted."""
    return tuple(sorted(name for name, label in LABELS.items() if label.holds(facts)))
