"""When a speedup is measured a second time, and what stands after it: the policy of confirmation, as pure functions.

Invariants: what a policy model is paid for a record or a jump was measured twice, on fresh seeds and in new processes;
a failure of ours in the second measurement costs the candidate nothing but the word `confirmed`.
"""

from __future__ import annotations

from evaluator.judgement.defences.confirmation import disagreement, settled
from evaluator.judgement.facts import Confirmation
from evaluator.judgement.judge import accepted_message
from tasks.records import Evaluation

ABOVE = 3.0
JUMP = 2.0
UNCONFIRMED = "unconfirmed"
"""Label of what should have been measured again and could not be."""
LABELS = {UNCONFIRMED: "A second measurement was due and failed for a reason of ours; the first value stands."}


def is_jump(score: float, best: float | None, *, above: float = ABOVE, jump: float = JUMP) -> bool:
    """Whether a score is above `above`, or more than `jump` times the best known of its task (None: none is known)."""
    return score > above or (best is not None and score > jump * best)


def needs_confirmation(
    score: float, best: float | None, *, above: float = ABOVE, confirmed: bool = False, elsewhere: bool = True
) -> bool:
    """Whether a score has to come back: a new best above the reference, or a jump.

    `confirmed` says that fresh seeds on the same device have given it already; then only another device of the type
    adds anything, if there is one (`elsewhere`).
    """
    if confirmed and not elsewhere:
        return False
    return score > max(1.0, best or 0.0) or is_jump(score, best, above=above)


def conclude(first: Evaluation, second: Evaluation | None, *, other_device: bool = False) -> Evaluation:
    """The evaluation that stands after an accepted one was made again (None: no second one came back).

    Agreement (within 10 %, or overlapping intervals) confirms the first value. Otherwise the lower one scores on a CPU
    and the candidate is `not_confirmed` on anything else; on a CPU it is so below half of the first. A second
    evaluation that rejects stands with its own reason; one that is unscored leaves the first, labelled `unconfirmed`.
    Raises ValueError when the first is not accepted.
    """
    measured, again = first.measurement, second.measurement if second is not None else None
    if first.outcome != "accepted" or measured is None:
        raise ValueError(f"only an accepted evaluation can be confirmed, not one that is {first.outcome}")
    if second is not None and second.outcome == "rejected":
        return second.model_copy(update={"detail": {**second.detail, "first_speedup": measured.speedup}})
    if second is None or second.outcome == "unscored" or again is None:
        labels = tuple(sorted({*first.labels, UNCONFIRMED}))
        return first.model_copy(
            update={"labels": labels, "message": f"{first.message} It could not be measured again."}
        )
    answer = Confirmation(
        speedup=again.speedup, ci_low=again.ci_low, ci_high=again.ci_high, other_device=other_device
    )  # fmt: skip
    seen = answer.model_dump(mode="json")
    common = {"step": "confirm", "facts": {**first.facts, "confirmation": seen}}
    problem = disagreement(measured, answer)
    if problem:
        detail = {**first.detail, **seen, "defence": "confirmation"}
        verdict = {"outcome": "rejected", "reason": "not_confirmed", "message": problem, "detail": detail}
        refuted = measured.model_copy(update={"confirmed": False})
        return first.model_copy(update={**common, **verdict, "measurement": refuted})
    stands = settled(measured, answer)
    return first.model_copy(update={**common, "measurement": stands, "message": accepted_message(stands)})
