"""Progress of a run as text: one line for logs and pipes, the same figures for a live terminal.

Invariant: pure; the figures come from the state alone, so that a line can be made from a stored stream as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.graph.ledger import SAMPLE_OUTCOMES
from deploy.graph.plan import RunPlan
from deploy.graph.state import RunState
from tasks.figures import times

LOOP = ("generating", "evaluating", "learning")
"""Phases of the loop proper; what comes before and after is not what an estimate is made from."""


@dataclass(frozen=True)
class Progress:
    """The figures of one moment."""

    phase: str
    elapsed_s: float
    step: int
    steps: int
    outcomes: dict[str, int]
    in_flight: int
    seeds: int
    best: dict[str, float]
    """Best new speedup by task."""
    tokens_per_s: float
    left_s: float | None
    """Estimated time left; None as long as there is nothing to estimate from."""


def measure(state: RunState, plan: RunPlan, *, started_s: float, now_s: float) -> Progress:
    """The figures now; `started_s` is when this process began. Both in Unix seconds, as the events have them."""
    counts = state.ledger.samples.counts()
    per_step = plan.groups_per_step * plan.samples_per_group * plan.turns
    total = plan.steps * per_step
    # A step's learning counts as much as a quarter of its samples; a guess that only shapes the estimate.
    done = counts["dispatched"] - counts["in_flight"] + state.step * per_step / 4
    share = min(1.0, done / (total * 1.25)) if total else 1.0
    spent = sum(state.seconds_by_phase.get(phase, 0.0) for phase in LOOP)
    spent += max(0.0, now_s - state.phase_since_s) if state.phase in LOOP else 0.0
    return Progress(
        phase=state.phase,
        elapsed_s=max(0.0, now_s - started_s),
        step=state.step,
        steps=plan.steps,
        outcomes={name: counts[name] for name in SAMPLE_OUTCOMES},
        in_flight=counts["in_flight"],
        seeds=len(state.seeds),
        best={task: event.speedup or 0.0 for (task, _), event in sorted(state.best().items())},
        tokens_per_s=_tokens_per_s(state, plan, spent),
        left_s=spent * (1 - share) / share if 0.1 <= share < 1.0 else None,
    )


def _tokens_per_s(state: RunState, plan: RunPlan, loop_s: float) -> float:
    """Over the time spent generating; over the whole loop where the roles work side by side."""
    seconds = state.seconds_by_phase.get("generating", 0.0) if plan.take_turns else loop_s
    return sum(event.new_tokens for event in state.left.values()) / seconds if seconds > 0 else 0.0


def line(progress: Progress) -> str:
    """One plain line."""
    outcomes = ", ".join(f"{count} {name}" for name, count in progress.outcomes.items() if count) or "none left yet"
    parts = [
        f"{duration(progress.elapsed_s)} {progress.phase}",
        f"step {progress.step}/{progress.steps}",
        f"samples: {outcomes}, {progress.in_flight} in flight",
    ]
    if progress.seeds and not any(progress.outcomes.values()):
        parts.append(f"{progress.seeds} seed kernels evaluated")
    if progress.best:
        best = sorted(progress.best.items(), key=lambda item: -item[1])[:3]
        parts.append("best new: " + ", ".join(f"{task.rpartition(':')[2]} {times(speedup)}" for task, speedup in best))
    if progress.tokens_per_s:
        parts.append(f"{progress.tokens_per_s:.0f} tokens/s")
    if progress.left_s is not None:
        parts.append(f"about {duration(progress.left_s)} left")
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
