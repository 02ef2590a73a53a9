"""Admission of a task: its domain, its error budgets, and whether its output can tell right from wrong at all.

Runs once per task and device, before any candidate; the result is JSON and can be cached under the task's hash.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from evaluator.judgement.facts import DrawKind
from evaluator.reference.adversaries import (
    CONSTANT_LIKE,
    LOWER_PRECISION,
    adversaries,
    half_errors,
    lower_precision,
    passes,
    poisoned,
)
from evaluator.reference.budget import ErrorBudget
from evaluator.reference.comparison import same_bits
from evaluator.reference.domain import Domain, draw_inputs, explore
from evaluator.reference.oracle import Oracle, build_budget, find_exact_density
from evaluator.reference.parameters import draw_state, usable_state
from evaluator.reference.subject import Leaves, Subject
from tasks.records.task import Precision

MOST_SEEDS = 3
"""Oracle seeds of each kind of draw for small tasks."""
ENOUGH_ELEMENTS = 1 << 21
"""Output elements over all seeds of a kind that give tiles enough; larger outputs need fewer seeds, one at least."""
LONG_CALL_S = 0.25
"""Above this time of a reference call one seed has to do."""

Randomness = Literal["none", "dropout", "inherent"]


class Admission(BaseModel):
    """What is known of a task before its first candidate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    domain: Domain
    budgets: tuple[ErrorBudget, ...]
    """One for each kind of draw, for drawn parameters."""
    constructed_budget: ErrorBudget | None = None
    """For inputs as given and parameters as constructed; None for a task without parameters."""
    passed: tuple[str, ...] = ()
    """Adversaries that are within budget, with drawn parameters or as constructed."""
    degenerate: bool = False
    """A constant, another call's output or shuffled rows pass: the output hardly depends on the input."""
    precision_blind: bool = False
    """The next lower precision passes the budget of every kind of draw."""
    output_constant: bool = False
    """The reference's output is bit-equal over different inputs."""
    poison_shows: bool = False
    """NaN in the inputs changes the reference's output."""
    repeats: bool = True
    """The reference gives the same bits for the same inputs."""
    randomness: Randomness = "none"
    """`dropout`: random until its dropout modules are in eval mode, which they now are; `inherent`: random anyway."""
    parameters_matter: bool = True
    """Other parameters change the output by more than the budget; also True where there are none."""
    reference_call_s: float = 0.0

    def budget(self, kind: DrawKind, *, constructed: bool = False) -> ErrorBudget:
        """The budget of a kind of draw; raises KeyError for one that the task does not admit.

        `constructed`: the parameters are still as the constructor made them. Identity scales and zero shifts can make
        such an output pure rounding noise, so that its budget says nothing about drawn parameters.
        """
        if constructed and kind == "as_given" and self.constructed_budget is not None:
            return self.constructed_budget
        for budget in self.budgets:
            if budget.kind == kind:
                return budget
        raise KeyError(kind)


def quieten(subject: Subject, inputs: Sequence[Any]) -> Randomness:
    """Finds out whether the reference is random and, where dropout modules make it so, puts those into eval mode."""
    if _same_over_seeds(subject, inputs):
        return "none"
    for module in subject.module.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.eval()
    return "dropout" if _same_over_seeds(subject, inputs) else "inherent"


def _same_over_seeds(subject: Subject, inputs: Sequence[Any]) -> bool:
    return same_bits(subject.run(inputs, seed=1), subject.run(inputs, seed=2))


def admit(
    subject: Subject,
    *,
    secret: int,
    precision: Precision = "fp32",
    kinds: Sequence[DrawKind] | None = None,
    seeds_per_kind: int | None = None,
    oracle_limit_bytes: float = float("inf"),
) -> Admission:
    """Explores a task under secret seeds. `kinds` limits the kinds of draw (all that the task admits by default).

    The subject's dropout modules are left in eval mode where they are what makes it random. Raises whatever the
    reference raises on its own inputs: such a task cannot be judged.
    """
    rng = random.Random(f"admission/{secret}")
    inputs = subject.draw(rng.getrandbits(62))
    started = time.perf_counter()
    outputs = subject.run(inputs)
    call_s = time.perf_counter() - started
    randomness = quieten(subject, inputs)
    if randomness == "dropout":
        outputs = subject.run(inputs)
    repeats = randomness == "none" or same_bits(outputs, subject.run(inputs))
    oracle = Oracle(subject, oracle_limit_bytes)
    domain = _limited(explore(subject, rng.getrandbits(62)), kinds)
    if kinds is None or "exact" in kinds:
        domain = _with_exact(domain, find_exact_density(subject, domain, rng.getrandbits(62), oracle))
    count = seeds_per_kind or _seeds_needed(outputs, call_s)
    budgets = [
        build_budget(
            subject, domain, kind, [rng.getrandbits(62) for _ in range(count)], precision=precision, oracle=oracle
        )
        for kind in domain.kinds
    ]
    half = half_errors(subject, inputs, precision, usable_state(subject, rng.getrandbits(62), inputs=inputs))
    budgets = [_with_half(budget, half) for budget in budgets]
    plain = None
    if subject.module.state_dict():
        seeds = [rng.getrandbits(62) for _ in range(count)]
        plain = build_budget(subject, domain, "as_given", seeds, precision=precision, oracle=oracle, constructed=True)
        plain = _with_half(plain, half)
    lint = _lint(subject, rng.getrandbits(62), budgets[0], plain, precision)
    return Admission(
        domain=domain,
        budgets=tuple(budgets),
        constructed_budget=plain,
        passed=lint.passed,
        degenerate=lint.output_constant or any(name in CONSTANT_LIKE for name in lint.passed),
        precision_blind=LOWER_PRECISION in lint.passed
        and not _shows_precision(subject, domain, budgets[1:], rng.getrandbits(62), precision),
        output_constant=lint.output_constant,
        poison_shows=not same_bits(outputs, subject.run(poisoned(inputs))),
        repeats=repeats,
        randomness=randomness,
        parameters_matter=lint.parameters_matter,
        reference_call_s=call_s,
    )


def _seeds_needed(outputs: Leaves, call_s: float) -> int:
    elements = max((leaf.numel() for _, leaf in outputs), default=1)
    return 1 if call_s > LONG_CALL_S else max(1, min(MOST_SEEDS, ENOUGH_ELEMENTS // max(1, elements)))


def _limited(domain: Domain, kinds: Sequence[DrawKind] | None) -> Domain:
    if kinds is None:
        return domain
    return domain.model_copy(update={"kinds": tuple(kind for kind in domain.kinds if kind in kinds)})


def _with_exact(domain: Domain, density: float) -> Domain:
    if not density:
        return domain
    return domain.model_copy(update={"kinds": (*domain.kinds, "exact"), "exact_density": density})


def _with_half(budget: ErrorBudget, half: dict[str, float]) -> ErrorBudget:
    leaves = [leaf.model_copy(update={"half_rms_rel": half.get(leaf.path, 0.0)}) for leaf in budget.leaves]
    return budget.model_copy(update={"leaves": tuple(leaves)})


@dataclass(frozen=True)
class _Lint:
    """What the adversaries showed."""

    passed: tuple[str, ...]
    output_constant: bool
    parameters_matter: bool


def _lint(subject: Subject, seed: int, drawn: ErrorBudget, plain: ErrorBudget | None, precision: Precision) -> _Lint:
    """Tries the adversaries with drawn parameters and, where there are any, with those as constructed."""
    inputs, others = subject.draw(seed), subject.draw(seed + 1)
    regimes: list[tuple[ErrorBudget, dict[str, torch.Tensor] | None]] = [(drawn, usable_state(subject, seed))]
    if plain is not None:
        regimes.append((plain, None))
    found: dict[str, None] = {}
    answers: list[Leaves] = []
    constant = False
    for budget, state in regimes:
        outputs, previous = subject.run(inputs, state), subject.run(others, state)
        constant = constant or same_bits(outputs, previous)
        wrong = adversaries(outputs, previous, lower_precision(subject, inputs, precision, state))
        found.update({name: None for name, answer in wrong.items() if passes(answer, outputs, budget)})
        answers.append(outputs)
    return _Lint(tuple(found), constant, plain is None or passes(answers[0], answers[1], drawn) is False)


def _shows_precision(
    subject: Subject, domain: Domain, budgets: Sequence[ErrorBudget], seed: int, precision: Precision
) -> bool:
    """Whether another kind of draw sees the lower precision that inputs as given average away (long positive sums)."""
    for budget in budgets:
        inputs = draw_inputs(subject, domain, budget.kind, seed)
        state = draw_state(subject.module, seed, "exact") if budget.kind == "exact" else usable_state(subject, seed)
        outputs = subject.run(inputs, state)
        if passes(lower_precision(subject, inputs, precision, state), outputs, budget) is False:
            return True
    return False
