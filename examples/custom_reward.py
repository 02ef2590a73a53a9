"""A reward of one's own: from the evaluations of a group to the numbers that a policy learns from.

    python examples/custom_reward.py

An evaluation keeps outcome, reason, labels and measurement apart, so that a reward can weigh them as it likes. This one
pays the logarithm of the interval's lower end (noise pays nothing), nothing for a gain without a change of formula, and
a little less for longer code; a slow kernel still pays more than a wrong one, and what the machine failed to score is
left out instead of punished.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev

from evaluator import Evaluator, EvaluatorConfig
from tasks.records import Candidate, Evaluation
from tasks.suites import load_task

TASK = Path(__file__).parent / "suite" / "center_rows.py"
EXPRESSIONS = (
    "x - x.mean(dim=1, keepdim=True)",
    "x - (x.sum(dim=1, keepdim=True) / x.shape[1]).expand_as(x)",
    "x - x.mean(dim=0, keepdim=True)",
    "torch.stack([row - row.mean() for row in x])",
)


def reward(evaluation: Evaluation, candidate: Candidate) -> float | None:
    """In nats of speed; None for what says nothing about the candidate."""
    if evaluation.outcome == "unscored":
        return None
    if evaluation.outcome == "rejected" or evaluation.measurement is None:
        return -0.5
    gained = math.log(evaluation.measurement.ci_low)
    if "same_formula" in evaluation.labels:
        gained = min(gained, 0.0)
    return max(gained - 1e-4 * len(candidate.source), -0.4)


def advantages(rewards: Sequence[float]) -> list[float]:
    """GRPO's: each reward's distance from its group's mean, in the group's standard deviations."""
    spread = pstdev(rewards)
    return [(value - mean(rewards)) / spread if spread else 0.0 for value in rewards]


def main() -> None:
    task = load_task(TASK)
    scored = []
    with Evaluator("cpu", EvaluatorConfig(protocol="reward")) as evaluator:
        for expression in EXPRESSIONS:
            forward = f"    def forward(self, x):\n        return {expression}\n"
            candidate = Candidate(source=f"import torch\nclass ModelNew(torch.nn.Module):\n{forward}")
            evaluation = evaluator.evaluate(task, candidate)
            value = reward(evaluation, candidate)
            if value is not None:
                scored.append((expression, evaluation, value))
    for (expression, evaluation, value), advantage in zip(scored, advantages([s[2] for s in scored]), strict=True):
        print(f"{value:+.3f}  advantage {advantage:+.2f}  {evaluation.outcome:<8}  {expression}")


if __name__ == "__main__":
    main()
