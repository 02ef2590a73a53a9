"""The verdict: a pure function of facts and rules.

Which reason a candidate with several faults gets is decided by `PRECEDENCE`: first what makes every later observation
worthless (no candidate, forged messages, a tampered process), then how the worker ended, then what the outputs are,
then what they say, then the clock, then policy, then luck. The last word, `review`, is a reviewing model's: no fact
yields it. A proven fault stands above a failure of ours; a failure of ours above a missing measurement.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from evaluator.judgement.defences import ALL_DEFENCES, DEFENCES
from evaluator.judgement.defences.base import Defence, Fault
from evaluator.judgement.defences.confirmation import settled
from evaluator.judgement.facts import Facts
from evaluator.judgement.labels import labels_of
from evaluator.judgement.rules import Rules
from tasks.figures import interval, times
from tasks.records.evaluation import Measurement, Outcome, Reason, RejectionReason, Step

LOWERED = 1.1
"""How far a score may lie below the ratio of the times before the message says why."""

PRECEDENCE: tuple[RejectionReason, ...] = (
    "contract", "compile_error", "forged_result", "tampering", "timeout", "crash", "lazy_output", "input_mutation",
    "aliasing", "constant_output", "caching", "hyperparameter", "precision_downgrade", "incorrect", "state_leak",
    "stream_escape", "timing_escape", "resource_abuse", "fallback", "not_confirmed", "review",
)  # fmt: skip


class Verdict(BaseModel):
    """The outcome of one candidate under some rules; the fields are those of `tasks.records.Evaluation`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    outcome: Outcome
    reason: Reason | None = None
    step: Step
    labels: tuple[str, ...] = ()
    message: str = ""
    detail: dict[str, Any] = Field(default_factory=dict)
    measurement: Measurement | None = None


def gate_faults(facts: Facts) -> list[Fault]:
    """What stops a candidate before it can run: text that does not parse, no `ModelNew`, a build that failed."""
    screen, build = facts.screen, facts.compile
    if screen.syntax_error:
        return [Fault("contract", "screen", f"The source does not parse: {screen.syntax_error}.", {}, "screen")]
    if screen.too_long:
        message = f"The source has {screen.source_bytes} bytes, more than a candidate may have."
        return [Fault("contract", "screen", message, {}, "screen")]
    if not screen.names_model:
        return [Fault("contract", "screen", "The source defines no class ModelNew.", {}, "screen")]
    if build.failed:
        first = build.error.strip().splitlines()
        message = f"A kernel does not compile: {first[0] if first else 'no compiler text'}"
        return [Fault("compile_error", "compile", message, {"compiler": build.error}, "compile")]
    return []


def faults(facts: Facts, rules: Rules, on: Collection[str] = ALL_DEFENCES) -> list[Fault]:
    """All faults that the defences in `on` find, in the order of `PRECEDENCE`, then of `DEFENCES`."""
    switched_on = [defence for name, defence in DEFENCES.items() if name in on]
    limited = facts.model_copy(update={"draws": _counting(facts, on)})
    found = gate_faults(facts)
    for defence in switched_on:
        found += [_named(fault, defence) for fault in defence.find(limited, rules)]
    return sorted(found, key=lambda fault: PRECEDENCE.index(fault.reason))


def first_fault(facts: Facts, rules: Rules, on: Collection[str] = ALL_DEFENCES) -> Fault | None:
    """The fault that would decide now; None while nothing is wrong. For ending an evaluation early."""
    found = faults(facts, rules, on)
    return found[0] if found else None


def judge(facts: Facts, rules: Rules, on: Collection[str] = ALL_DEFENCES) -> Verdict:
    """The verdict on a finished evaluation: rejected for the first fault, unscored for a failure of ours, else
    accepted.

    `on` are the names of the defences that were on. Facts without fault, failure and measurement are unscored
    (`evaluator_lost`): silence is never a success.
    """
    labels = labels_of(facts)
    found = faults(facts, rules, on)
    if found:
        fault = found[0]
        others = sorted({other.reason for other in found[1:]} - {fault.reason})
        detail = {**fault.detail, "defence": fault.defence, **({"also": others} if others else {})}
        return Verdict(
            outcome="rejected",
            reason=fault.reason,
            step=fault.step,
            labels=labels,
            message=fault.message,
            detail=detail,
            measurement=facts.measurement,
        )
    if facts.infrastructure is not None:
        failure = facts.infrastructure
        return Verdict(
            outcome="unscored", reason=failure.reason, step=failure.step, labels=labels, message=failure.detail
        )
    if facts.measurement is None:
        message = "The evaluation ended without a measurement; evaluate again."
        return Verdict(outcome="unscored", reason="evaluator_lost", step=facts.step, labels=labels, message=message)
    measurement = facts.measurement
    if facts.confirmation is not None and "confirmation" in on:
        measurement = settled(measurement, facts.confirmation)
    return Verdict(
        outcome="accepted",
        step=facts.step,
        labels=labels,
        message=accepted_message(measurement),
        measurement=measurement,
    )


def _counting(facts: Facts, on: Collection[str]) -> tuple[Any, ...]:
    """Tallies that no switched-off defence governs."""
    off = [defence for name, defence in DEFENCES.items() if name not in on]
    return tuple(tally for tally in facts.draws if not any(defence.governs(tally) for defence in off))


def _named(fault: Fault, defence: Defence) -> Fault:
    return Fault(fault.reason, fault.step, fault.message, fault.detail, defence.name)


def accepted_message(measurement: Measurement) -> str:
    """What is said of an accepted candidate; also why its score is below what its times suggest."""
    text = (
        f"Right on every call; {times(measurement.speedup)} the reference's speed "
        f"({interval(measurement.ci_low, measurement.ci_high)})."
    )
    by_times = measurement.reference_ms / measurement.candidate_ms
    if by_times > LOWERED * measurement.speedup:
        text += (
            f" Its usual calls alone would say {times(by_times)}; all calls, the first of each turn included, and the "
            "judge's own clock show no more than what is scored."
        )
    return text
