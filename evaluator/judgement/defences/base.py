"""What a defence is: a named, pure look at the facts that yields faults.

Invariants: a defence reads facts and rules only; it can be turned off by name, and then neither finds nor governs
anything; which fault decides is the judge's affair, not the defence's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from evaluator.judgement.facts import DrawTally, Facts
from evaluator.judgement.rules import Rules
from tasks.records.evaluation import RejectionReason, Step


@dataclass(frozen=True)
class Fault:
    """One proven reason to reject.

    `message` is one sentence for a person; `detail` is the evidence, stable JSON values only.
    """

    reason: RejectionReason
    step: Step
    message: str
    detail: dict[str, Any] = field(default_factory=dict)
    defence: str = ""


Finder = Callable[[Facts, Rules], list[Fault]]


def _finds_nothing(facts: Facts, rules: Rules) -> list[Fault]:  # noqa: ARG001
    return []


def _governs_nothing(tally: DrawTally) -> bool:  # noqa: ARG001
    return False


@dataclass(frozen=True)
class Defence:
    """A defence by name.

    `family` is the cheat family that it answers, `facts` the fields of `Facts` that it rests on. `find` yields faults.
    `yields` are the reasons of its faults. `forgiven` is the key of `Rules` whose other values than that of `strict`
    forgive them all, `softened` are those that forgive some, with a value where only that one does.
    `governs` says which compared calls count because of it: with the defence off they are left out.
    `active` names what the evaluator does for it beyond looking, and must stop doing when it is off; empty for none.
    """

    name: str
    family: str
    facts: tuple[str, ...]
    find: Finder = _finds_nothing
    governs: Callable[[DrawTally], bool] = _governs_nothing
    active: str = ""
    yields: tuple[RejectionReason, ...] = ()
    forgiven: str = ""
    softened: tuple[str, ...] = ()
