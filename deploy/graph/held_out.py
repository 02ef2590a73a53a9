"""Evaluation on held-out sets: what is drawn at a step, and the figures that come of it.

Pure. Invariants: the prompts of a set are the same at every step and for every policy of a run, exemplars included;
nothing of a held-out sample is trained on or shown to anyone; what the infrastructure broke counts nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.graph.events import HeldOutMeasured, SampleLeft

if TYPE_CHECKING:
    from deploy.graph.plan import RunPlan
    from deploy.graph.state import RunState

ABOVE = 1.05
"""Speedup from which a kernel counts as faster."""


@dataclass(frozen=True)
class HeldOutPrompt:
    """One prompt of a held-out set."""

    name: str
    """Of the set."""
    task_id: str
    device_type: str
    exemplars: bool

    @property
    def key(self) -> tuple[str, str, bool]:
        """What figures are told apart by."""
        return self.name, self.device_type, self.exemplars


def group_name(run_id: str, epoch: int, step: int, number: int) -> str:
    """Id of the group of the `number`-th prompt at a step; the lineage is in it, so that a lost one's is not taken."""
    return f"{run_id}-h{epoch}.{step}-{number:04d}"


def held_out_now(plan: RunPlan, state: RunState) -> dict[str, HeldOutPrompt]:
    """The prompts of an evaluation at the present step, by their groups' ids."""
    return {
        group_name(plan.run_id, state.epoch, state.step, number): prompt
        for number, prompt in enumerate(plan.held_out) if prompt.task_id not in state.skipped
    }  # fmt: skip


def figures_now(plan: RunPlan, state: RunState, prompts: Mapping[str, HeldOutPrompt]) -> list[HeldOutMeasured]:
    """The figures of all keys, once every sample of the prompts' groups has left."""
    found = []
    for key in dict.fromkeys(prompt.key for prompt in prompts.values()):
        own = {name: prompt for name, prompt in prompts.items() if prompt.key == key}
        left = [event for event in state.left.values() if event.group_id in own]
        found.append(measured(list(own.values()), left, epoch=state.epoch, step=state.step, lower_end=plan.lower_end))
    return found


def measured(
    prompts: Sequence[HeldOutPrompt], events: Sequence[SampleLeft], *, epoch: int, step: int, lower_end: bool
) -> HeldOutMeasured:
    """The figures of the prompts of one key from their samples.

    Speedups are the interval's lower end where that is what is paid (`lower_end`). A copy of a shown exemplar counts as
    a failure.
    """
    scored = [event for event in events if event.outcome in ("accepted", "rejected")]
    kept = [event for event in scored if event.outcome == "accepted" and not is_copy(event)]
    speedups = [(event.ci_low if lower_end else event.speedup) or 0.0 for event in kept]
    distances = [event.edit_distance for event in kept if event.edit_distance is not None]
    count = max(1, len(scored))
    first = prompts[0]
    return HeldOutMeasured(
        name=first.name, device_type=first.device_type, exemplars=first.exemplars, epoch=epoch, step=step,
        prompts=len(prompts), samples=len(scored), unscored=len(events) - len(scored),
        mean_log_speedup=sum(math.log(max(1.0, speedup)) for speedup in speedups) / count,
        accepted_share=len(kept) / count,
        above_share=sum(speedup > ABOVE for speedup in speedups) / count,
        distinct_accepted=len({event.candidate_hash for event in kept}),
        copies=sum(is_copy(event) for event in scored),
        edit_distance=sum(distances) / len(distances) if distances else None,
    )  # fmt: skip


def is_copy(event: SampleLeft) -> bool:
    """True for a kernel that equals one that its prompt showed: nothing lies between them."""
    return event.edit_distance == 0.0
