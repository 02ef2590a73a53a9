"""Winner's luck: a large or record speedup that does not come back on fresh seeds.

Rests on `Facts.measurement`, `Facts.confirmation` and `Facts.unstable` (the protocol refused itself). Two values
agree within 10 % or with overlapping intervals. On a CPU the lower one scores and only less than half is
`not_confirmed`; elsewhere any disagreement is.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Confirmation, Facts
from evaluator.judgement.rules import Rules
from tasks.figures import times
from tasks.records.evaluation import Measurement

AGREEMENT = 0.10


def agree(first: Measurement, second: Confirmation) -> bool:
    """Whether two speedups are within 10 % of the larger, or their intervals overlap."""
    larger, smaller = max(first.speedup, second.speedup), min(first.speedup, second.speedup)
    overlap = first.ci_low <= second.ci_high and second.ci_low <= first.ci_high
    return smaller >= (1 - AGREEMENT) * larger or overlap


def settled(first: Measurement, second: Confirmation) -> Measurement:
    """The measurement that scores after a confirmation: the first when they agree, else the lower one."""
    if agree(first, second) or second.speedup >= first.speedup:
        return first.model_copy(update={"confirmed": agree(first, second)})
    lower = {"speedup": second.speedup, "ci_low": second.ci_low, "ci_high": second.ci_high, "confirmed": False}
    return first.model_copy(update={**lower, "candidate_ms": first.reference_ms / second.speedup})


def disagreement(first: Measurement, second: Confirmation) -> str:
    """Why the first value counts as not confirmed, in one sentence; empty where one of the two values scores."""
    below_half = second.speedup < first.speedup / 2
    if agree(first, second) or (first.device_type == "cpu" and not below_half):
        return ""
    where = " on another device" if second.other_device else ""
    return f"Measured {times(first.speedup)}, but {times(second.speedup)} on fresh seeds{where}."


def _find(facts: Facts, rules: Rules) -> list[Fault]:  # noqa: ARG001
    faults = []
    detail = facts.confirmation.model_dump(mode="json") if facts.confirmation else {}
    if facts.unstable:
        faults.append(
            Fault("not_confirmed", "time", f"The protocol refused the measurement: {facts.unstable}.", detail)
        )
    first, second = facts.measurement, facts.confirmation
    problem = disagreement(first, second) if first is not None and second is not None else ""
    if problem:
        faults.append(Fault("not_confirmed", "confirm", problem, detail))
    return faults


DEFENCE = Defence(
    "confirmation", "statistics gaming", ("measurement", "confirmation", "unstable"), _find,
    yields=("not_confirmed",),
)  # fmt: skip
