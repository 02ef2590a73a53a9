"""What the defences that compare results share: which calls count, and how a wrong call is told.

A call counts when the rules bind its kind and every defence that governs it is on; the judge hands over facts whose
tallies are already limited to those, so that the defences here need not know which others are on.
"""

from __future__ import annotations

from typing import Any

from evaluator.judgement.defences.base import Fault
from evaluator.judgement.facts import Aspect, CallResult, DrawTally, Facts
from evaluator.judgement.rules import Rules
from tasks.records.evaluation import RejectionReason

KIND_WORDS = {
    "as_given": "inputs as get_inputs draws them",
    "shifted": "shifted inputs",
    "scaled": "scaled inputs",
    "flipped": "sign-flipped inputs",
    "exact": "small-integer inputs",
}


def binding(tally: DrawTally, rules: Rules) -> bool:
    """Whether the rules let the calls of this tally decide."""
    if rules.domain == "drawn" and tally.kind != "as_given":
        return False
    return not (rules.weights == "seeded" and tally.reloaded)


def forgiven_as_loose(tally: DrawTally, rules: Rules) -> bool:
    """Whether the rules forgive the tally's errors over budget because all are within 1e-2."""
    return rules.precision != "declared" and tally.loose_wrong == 0


def evidence(call: CallResult, tally: DrawTally, aspect: Aspect) -> dict[str, Any]:
    """What the record keeps of the first wrong call."""
    return {
        "output": call.leaf,
        "index": list(call.index),
        "got": call.got,
        "expected": call.expected,
        "error": call.error,
        "allowed": call.allowed,
        "worst_ratio": call.worst_ratio,
        "draw": call.kind,
        "seed": call.seed,
        "call": call.call,
        "parameters_reloaded": call.reloaded,
        "wrong_calls": tally.wrong.get(aspect, 0),
        "calls": tally.calls,
    }


def fault_of(reason: RejectionReason, what: str, tally: DrawTally, aspect: Aspect) -> Fault:
    """The fault of the tally's first call that is wrong in this aspect; `what` begins the sentence."""
    call = tally.first[aspect]
    where = f"output {call.leaf} at {list(call.index)}" if call.index else f"output {call.leaf}"
    state = " after the parameters were changed" if tally.reloaded else ""
    message = (
        f"{what}: {where} is {call.got}, expected {call.expected}"
        f"{f' (error {call.error}, allowed {call.allowed})' if call.allowed else ''}, "
        f"on {KIND_WORDS[tally.kind]}{state}."
    )
    return Fault(reason, tally.step, message, evidence(call, tally, aspect))


def wrong_tallies(facts: Facts, rules: Rules, aspect: Aspect) -> list[DrawTally]:
    """Binding tallies with at least one call that is wrong in this aspect."""
    return [tally for tally in facts.draws if tally.wrong.get(aspect) and binding(tally, rules)]
