"""A tiny policy learns through the real queue from its rewards, and not from shuffled ones.

    python scripts/tiny_policy.py --out docs/measurements/queue

Five seeds each with true and with shuffled rewards (each group's outcomes on the wrong samples). The reward is
scripted: 0.5 plus the share of odd tokens in a completion of at most four. Writes `tiny-policy.jsonl`, a line per step,
and prints for both the 95 % interval, over seeds, of the last quarter's mean reward minus the first quarter's.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import toy
from tasks.records import Task

STEPS = 24
SEEDS = 5
T_975 = 2.776
"""97.5 % quantile of Student's t with SEEDS - 1 degrees of freedom."""
SETTINGS = [
    "--learner.steps", str(STEPS), "--learner.grpo.groups_per_step", "2", "--rollout.sampling.group_size", "8",
    "--rollout.sampling.max_tokens", "4", "--learner.optimizer.learning_rate", "1e-2", "--store.strategy", "none",
    "--rollout.staleness.max_staleness", "0", "--learner.grpo.zero_variance", "keep", "--run.max_groups", "0",
]  # fmt: skip


def odd_share(task: Task, tokens: Sequence[int]) -> float | None:  # noqa: ARG001
    """Speedup 0.5 to 1.5 by the share of odd tokens; an empty answer is wrong."""
    return 0.5 + sum(token % 2 for token in tokens) / len(tokens) if tokens else None


def run(folder: Path, model: Path, seed: int, *, shuffled: bool) -> list[float]:
    """Mean reward of each step."""
    config = toy.toy_config("demo", [*SETTINGS, "--run.seed", str(seed), "--rollout.seed", str(seed)])
    state = toy.ToyRun(config, folder / f"r-{seed}", model, toy.toy_tasks(2), odd_share, shuffled=shuffled).run()
    state.ledger.check()
    return toy.rewards_by_step(state)


def gain(rewards: Sequence[float]) -> float:
    """Mean of the last quarter minus mean of the first."""
    quarter = len(rewards) // 4
    return statistics.mean(rewards[-quarter:]) - statistics.mean(rewards[:quarter])


def interval(gains: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean gain over SEEDS seeds."""
    middle, spread = statistics.mean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
    return middle - T_975 * spread, middle + T_975 * spread


def rewards_of(folder: Path, model: Path, *, shuffled: bool) -> list[list[float]]:
    """Rewards by step of each seed."""
    return [run(folder, model, seed, shuffled=shuffled) for seed in range(SEEDS)]


def main() -> int:
    """Runs both, writes and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for shuffled in (False, True):
        with tempfile.TemporaryDirectory(prefix="tiny-") as folder:
            found = rewards_of(Path(folder), toy.make_model(Path(folder) / "model"), shuffled=shuffled)
        low, high = interval([gain(rewards) for rewards in found])
        print(f"{'shuffled' if shuffled else 'true'} rewards: {low:+.3f} to {high:+.3f}", flush=True)
        lines += [
            {"shuffled": shuffled, "seed": seed, "step": step, "reward_mean": reward}
            for seed, rewards in enumerate(found) for step, reward in enumerate(rewards, start=1)
        ]  # fmt: skip
    toy.write_lines(options.out / "tiny-policy.jsonl", lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
