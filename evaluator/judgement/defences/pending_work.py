"""Deferred work: threads or processes that go on after forward has returned.

Rests on `Facts.pending`: an idle window after a checked call, in which the output must not change and the worker must
not compute. Yields `lazy_output` for an output that changed, `timing_escape` for computing, `resource_abuse` for a
process that outlives the call. Idle threads are free.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import Rules
from tasks.figures import milliseconds

BUSY_FLOOR_MS = 5.0
"""CPU time that winding down may take: thread pools go idle, an allocator trims."""
BUSY_SHARE = 0.3
"""Share of the idle window above which the worker counts as computing."""


def is_busy(busy_ms: float, idle_ms: float) -> bool:
    """Whether CPU time used in the idle window means work left over."""
    return busy_ms > max(BUSY_FLOOR_MS, BUSY_SHARE * idle_ms)


def _find(facts: Facts, rules: Rules) -> list[Fault]:  # noqa: ARG001
    seen = facts.pending
    detail = seen.model_dump(mode="json")
    faults = []
    if seen.late_writes:
        message = f"The output still changed after forward had returned, in {seen.late_writes} call(s)."
        faults.append(Fault("lazy_output", "check", message, detail))
    if is_busy(seen.busy_ms, seen.idle_ms):
        busy, idle = milliseconds(seen.busy_ms), milliseconds(seen.idle_ms)
        message = f"The worker computed for {busy} in the {idle} after forward returned."
        faults.append(Fault("timing_escape", "check", message, detail))
    if seen.processes:
        message = f"{seen.processes} process(es) of the candidate outlived the call."
        faults.append(Fault("resource_abuse", facts.step, message, detail))
    return faults


DEFENCE = Defence(
    "pending_work", "deferred work", ("pending",), _find, active="an idle window after checked calls",
    yields=("lazy_output", "timing_escape", "resource_abuse"),
)  # fmt: skip
