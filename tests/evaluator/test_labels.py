"""Labels from hand-made facts."""

from __future__ import annotations

import pytest

from evaluator.judgement import CallLedger, CallResult, Facts
from evaluator.judgement.facts import Alias, Degenerate, DrawTally, GlobalState, OwnWork, ScreenFacts
from evaluator.judgement.labels import labels_of


def tallies(*calls: CallResult) -> tuple[DrawTally, ...]:
    ledger = CallLedger()
    for call in calls:
        ledger.add(call)
    return ledger.tallies()


OWN = OwnWork(kernels_called=3, kernels_built=1)

CASES: list[tuple[Facts, set[str]]] = [
    (Facts(), {"library"}),
    (Facts(own_work=OWN), {"custom_kernel"}),
    (Facts(own_work=OwnWork(custom_share=0.8, library_share=0.2)), {"custom_kernel"}),
    (Facts(own_work=OwnWork(custom_share=0.1, library_share=0.9)), {"library"}),
    (Facts(own_work=OWN, screen=ScreenFacts(same_formula=True)), {"custom_kernel", "same_formula"}),
    (
        Facts(own_work=OwnWork(operators_equal=True), draws=tallies(CallResult(bit_equal=True))),
        {"library", "same_formula"},
    ),
    (Facts(own_work=OwnWork(operators_equal=True), draws=tallies(CallResult())), {"library"}),
    (Facts(own_work=OwnWork(compilers=("jit.script",), kernels_called=1)), {"custom_kernel", "compiler_wrapper"}),
    (Facts(own_work=OWN, aliases=(Alias(target="earlier_output"),)), {"custom_kernel", "static_output"}),
    (Facts(own_work=OWN, draws=tallies(CallResult(aspects=("budget",), half_like=True))), {"custom_kernel", "half"}),
    (
        Facts(own_work=OWN, draws=tallies(CallResult(), CallResult(reloaded=True, aspects=("stale",)))),
        {"custom_kernel", "init_folded_weights"},
    ),
    (
        Facts(own_work=OWN, global_state=GlobalState(settings=("cudnn.benchmark False->True",))),
        {"custom_kernel", "flags"},
    ),
    (Facts(own_work=OWN, captured_graph=True, copy_of="ab"), {"copy", "custom_kernel", "graph"}),
    (
        Facts(
            own_work=OWN,
            degenerate=Degenerate(task=True),
            random_reference=True,
            parameters="seeded",
            span_limited=True,
        ),
        {"custom_kernel", "degenerate_task", "random_reference", "seeded_weights", "span_limited"},
    ),
]


@pytest.mark.parametrize(("facts", "wanted"), CASES)
def test_labels_follow_from_facts(facts: Facts, wanted: set[str]) -> None:
    assert set(labels_of(facts)) == wanted
