"""A bandit through the real queue at chosen staleness: how many steps until the policy earns 90 % of the best.

    python scripts/bandit.py --out docs/measurements/queue --seeds 3

One prompt, one token an answer: 63 arms, each with a fixed reward (see `payoff`), of which the best pays 1. The
coordinator, store, queue, engine, learner and publication are the real ones (scripts/toy.py), and the learner waits
until generation is as far ahead as the staleness allows. What is reported is the policy's own expectation over all
arms, by the weights that were published, not the mean of noisy samples. Without staleness both sides have the same
weights, so that there is nothing to correct. Writes a line per step and a picture, prints a table.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import toy
from tasks.records import Task

STEPS = 120
SHARE = 0.9
"""Share of the best arm's reward that counts as solved."""
ARMS = [token for token in range(toy.WORDS) if token != toy.END]
LEARNING_RATE = 3e-3
COLOURS = {0: "#444", 4: "#06c", 8: "#c30"}


def payoff(task: Task, tokens: Sequence[int]) -> float | None:  # noqa: ARG001
    """Reward of an arm: 1 for token 50, from 0.02 to 0.5 for the others; an empty answer is rejected."""
    if not tokens:
        return None
    return 1.0 if tokens[0] == 50 else 0.02 + 0.48 * (tokens[0] * 7 % toy.WORDS) / toy.WORDS


def settings(staleness: int, correction: str, seed: int, steps: int, learning_rate: float) -> list[str]:
    """What one run differs in, and what all have in common."""
    return [
        "--learner.steps", str(steps), "--learner.grpo.groups_per_step", "2", "--rollout.sampling.group_size", "16",
        "--rollout.sampling.max_tokens", "1", "--store.strategy", "none", "--run.max_groups", "0",
        "--cluster.take_turns", "false", "--rollout.staleness.max_staleness", str(staleness),
        "--learner.grpo.max_staleness", str(staleness), "--learner.grpo.zero_variance", "keep",
        "--learner.grpo.correction", correction, "--learner.optimizer.learning_rate", str(learning_rate),
        "--run.seed", str(seed), "--rollout.seed", str(seed), "--rollout.staleness.max_groups_in_flight", "1",
    ]  # fmt: skip


def run(
    folder: Path, staleness: int, correction: str, seed: int, steps: int = STEPS, learning_rate: float = LEARNING_RATE
) -> list[dict[str, Any]]:
    """One run; a line per optimizer step."""
    model = toy.make_model(folder / "model", seed)
    expectations: list[float] = []

    class Watched(toy.ToyGenerator):
        """Notes what the policy expects to earn whenever it has new weights."""

        async def finish_update(self, version: Any) -> None:
            await super().finish_update(version)
            expectations.append(expectation(newest(folder / "r-1" / "weights")))

    task = toy.toy_tasks(1)
    config = toy.toy_config("demo", settings(staleness, correction, seed, steps, learning_rate))
    state = toy.ToyRun(config, folder / "r-1", model, task, payoff, paced=True, generator=Watched).run()
    state.ledger.check()
    return [
        {
            "staleness": staleness, "correction": correction, "seed": seed, "step": event.step,
            "expectation": expectations[event.step], "reward_mean": event.metrics["reward_mean"],
            "staleness_max": event.metrics["staleness_max"], "mismatch_kl": event.metrics["mismatch_kl"],
            "correction_cut_share": event.metrics["correction_cut_share"], "entropy": event.metrics["entropy"],
        }
        for event in state.steps
    ]  # fmt: skip


def newest(folder: Path) -> Path:
    """The weights that were written last."""
    return max(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


@cache
def empty_model() -> Any:
    """The policy's shape, to be filled with weights."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(toy.model_config()).eval()


def expectation(weights: Path) -> float:
    """Expected reward of the policy with these weights: sum over arms of probability times payoff."""
    import torch
    from safetensors.torch import load_file

    task, model = toy.toy_tasks(1)[0], empty_model()
    model.load_state_dict(load_file(weights))
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[3 + toy.number_of(task)]])).logits[0, -1]
    chances = torch.softmax(logits.double(), dim=-1).tolist()
    return sum(chances[arm] * (payoff(task, (arm,)) or 0.0) for arm in ARMS)


def steps_to_solve(lines: Sequence[dict[str, Any]]) -> int | None:
    """First step from which the expectation is at least SHARE of the best arm's reward; None when it never is."""
    return next((line["step"] for line in lines if line["expectation"] >= SHARE), None)


def table(runs: dict[tuple[int, str], list[list[dict[str, Any]]]], steps: int) -> list[str]:
    """Markdown rows: a row per arm of the comparison, over its seeds."""
    rows = [
        "| staleness | correction | realised staleness | steps to 90 %, each seed | median | last expectation, mean "
        "(least) | largest mismatch KL | cut share |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (staleness, correction), seeds in runs.items():
        solved = [steps_to_solve(lines) for lines in seeds]
        shown = ", ".join("never" if at is None else str(at) for at in solved)
        middle = statistics.median(math.inf if at is None else at for at in solved)
        last = [lines[-1]["expectation"] for lines in seeds]
        realised = max(line["staleness_max"] for lines in seeds for line in lines)
        mismatch = max(line["mismatch_kl"] for lines in seeds for line in lines)
        cut = statistics.mean(line["correction_cut_share"] for lines in seeds for line in lines)
        rows.append(
            f"| {staleness} | {correction} | {realised:.0f} | {shown} | "
            f"{'never in ' + str(steps) if math.isinf(middle) else f'{middle:g}'} | "
            f"{statistics.mean(last):.3f} ({min(last):.3f}) | {mismatch:.3g} | {cut:.1%} |"
        )
    return rows


def plot(runs: dict[tuple[int, str], list[list[dict[str, Any]]]], steps: int) -> str:
    """An SVG picture: for each arm of the comparison the mean expectation over its seeds, by step."""
    width, height, left, top = 640, 320, 50, 20
    shapes = []
    for level in (0.0, 0.25, 0.5, 0.75, SHARE, 1.0):
        y = top + height * (1 - level)
        shapes.append(f'<path d="M{left} {y:.1f}h{width}" stroke="#ccc"/>')
        shapes.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{level:g}</text>')
    for step in range(0, steps + 1, 20):
        x = left + width * step / steps
        shapes.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{step}</text>')
    for number, ((staleness, correction), seeds) in enumerate(runs.items()):
        colour = COLOURS[staleness]
        dash = ' stroke-dasharray="5 4"' if correction == "none" else ""
        means = [
            statistics.mean(at) for at in zip(*([line["expectation"] for line in run] for run in seeds), strict=True)
        ]
        points = " ".join(
            f"{left + width * (at + 1) / steps:.1f},{top + height * (1 - value):.1f}" for at, value in enumerate(means)
        )
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>')
        y = top + 150 + 18 * number
        shapes.append(f'<path d="M{left + 430} {y - 4}h30" stroke="{colour}" stroke-width="1.5"{dash}/>')
        shapes.append(f'<text x="{left + 468}" y="{y}">staleness {staleness}, {correction}</text>')
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {top + height + 30}" '
        f'font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'
    )


def read_runs(path: Path) -> dict[tuple[int, str], list[list[dict[str, Any]]]]:
    """The runs of a `bandit.jsonl`, by staleness and correction, then seed."""
    found: dict[tuple[int, str], dict[int, list[dict[str, Any]]]] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        seeds = found.setdefault((line["staleness"], line["correction"]), {})
        seeds.setdefault(line["seed"], []).append(line)
    return {arm: [seeds[seed] for seed in sorted(seeds)] for arm, seeds in found.items()}


def main() -> int:
    """Runs every combination, writes and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--name", default="bandit", help="of the files that are written")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 4, 8])
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    arms = [
        (n, correction) for n in options.staleness for correction in ("truncated", "none") if n or correction != "none"
    ]
    runs: dict[tuple[int, str], list[list[dict[str, Any]]]] = {arm: [] for arm in arms}
    for seed in range(options.seeds):
        for staleness, correction in arms:
            with tempfile.TemporaryDirectory(prefix="bandit-") as folder:
                lines = run(Path(folder), staleness, correction, seed, options.steps, options.learning_rate)
            runs[staleness, correction].append(lines)
            print(f"staleness {staleness}, {correction}, seed {seed}: {steps_to_solve(lines)}", flush=True)
            everything = [line for seeds in runs.values() for found in seeds for line in found]
            toy.write_lines(options.out / f"{options.name}.jsonl", everything)
    (options.out / f"{options.name}.svg").write_text(plot(runs, options.steps))
    rows = table(runs, options.steps)
    print("\n".join([f"torch {torch.__version__}, Python {platform.python_version()}", *rows]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
