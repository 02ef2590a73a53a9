"""Not a kernel: a result that comes from the reference, a handler or beside an idle kernel.

Rests on `Facts.own_work`. Behaviour, not words: forward runs once or twice under a tracer in the check; a call in which
the candidate's own code caught an exception reached its result through a handler, and when every traced call did, the
advertised path never works. A build or launch that failed and was survived, a kernel that is built and never called,
and a kernel without influence on the output are the same. Yields `fallback` where own work is asked for.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts, OwnWork
from evaluator.judgement.rules import Rules


def fallback_kinds(work: OwnWork) -> list[str]:
    """How the candidate's own path was not what made the result; empty when nothing was seen."""
    kinds = []
    if work.found_reference:
        kinds.append("it got hold of the reference's class or source")
    if work.calls_traced and work.calls_with_swallowed == work.calls_traced:
        kinds.append(f"every call caught an exception on the way ({'; '.join(work.swallowed[:3])})")
    if work.kernels_failed:
        kinds.append(f"{work.kernels_failed} of its own kernels failed to build or start")
    elif work.kernels_built and work.kernels_called == 0:
        kinds.append("its own kernels were built and never called")
    if work.output_depends_on_kernel is False:
        kinds.append("the output does not depend on its own kernel")
    return kinds


def _find(facts: Facts, rules: Rules) -> list[Fault]:
    kinds = fallback_kinds(facts.own_work)
    if rules.own_work != "own" or not kinds:
        return []
    message = f"The result is not the candidate's own work: {'; '.join(kinds)}."
    return [Fault("fallback", "check", message, facts.own_work.model_dump(mode="json"))]


DEFENCE = Defence(
    "fallback", "not a kernel", ("own_work",), _find, active="some calls of the check run under a tracer",
    yields=("fallback",), forgiven="own_work",
)  # fmt: skip
