"""Early ends: crashes, exits (with code 0 too), hangs and what a worker takes down with it.

Rests on `Facts.ending`. Whatever happens while a worker lives is the candidate's doing: a hang is `timeout`; an
exception, exit or signal is `crash`; the memory limit, or a reference that fails beside the worker and passes without
it, is `resource_abuse`; a zygote that dies while its worker holds the turn is `tampering`; a missing or unusable
`ModelNew` is `contract`.
"""

from __future__ import annotations

from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.facts import Facts
from evaluator.judgement.rules import Rules
from tasks.records.evaluation import RejectionReason

_REASONS: dict[str, tuple[RejectionReason, str]] = {
    "contract": ("contract", "The candidate does not fit the task's interface"),
    "exception": ("crash", "The candidate raised"),
    "exit": ("crash", "The worker ended early"),
    "signal": ("crash", "The worker was ended by a signal"),
    "deadline": ("timeout", "The candidate did not finish in time"),
    "memory_limit": ("resource_abuse", "The worker went over its memory limit"),
    "zygote_died": ("tampering", "The worker's parent process died during its turn"),
    "reference_failed_beside": ("resource_abuse", "The reference fails beside this worker and passes without it"),
}


def _find(facts: Facts, rules: Rules) -> list[Fault]:  # noqa: ARG001
    ending = facts.ending
    if ending is None:
        return []
    reason, what = _REASONS[ending.kind]
    message = f"{what}: {ending.detail}." if ending.detail else f"{what}."
    return [Fault(reason, ending.step, message, ending.model_dump(mode="json"))]


DEFENCE = Defence(
    "early_exit", "early ends", ("ending",), _find,
    yields=("contract", "crash", "timeout", "resource_abuse", "tampering"),
)  # fmt: skip
