"""What the coordinator has to know of the configuration, and nothing else; plain values, so that tests need no tree."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.graph.held_out import HeldOutPrompt
from rollout.staleness import StalenessState


@dataclass(frozen=True)
class RunPlan:
    """The numbers of one run; times in seconds."""

    run_id: str
    targets: tuple[tuple[str, str], ...]
    """(task id, device type) pairs, in the order of the list."""
    steps: int = 2
    groups_per_step: int = 4
    samples_per_group: int = 4
    """Samples of one turn."""
    turns: int = 1
    max_groups: int = 0
    """Groups formed at most; 0 means as many as the steps need."""
    give_up_after: int = 0
    """Groups dropped one after another, without a step between, that end the run; 0 never does."""
    max_staleness: int = 0
    """Policy steps that a group may lag behind when it is trained."""
    concurrent_groups: int = 16
    concurrent_scores: int = 1
    concurrent_seeds: int = 1
    """Tasks whose seed kernels are evaluated at a time."""
    seeds: bool = True
    confirm: bool = True
    confirm_above: float = 1.0
    """The interval's lower end above which a new kernel is measured again."""
    controls: bool = False
    """Whether evaluators measure references against themselves."""
    partial_steps: bool = False
    """A step may be taken with fewer groups than `groups_per_step` when the others were dropped."""
    take_turns: bool = True
    turn_quota: int = 64
    attempts: int = 2
    """How often a sample is drawn, and how often it is evaluated, before it is given up."""
    held_out: tuple[HeldOutPrompt, ...] = ()
    eval_every: int = 0
    """Steps between two evaluations on the held-out prompts; 0 never."""
    held_out_samples: int = 4
    """Samples of each held-out prompt."""
    held_out_seeds: bool = False
    """Whether held-out tasks' seed kernels are evaluated, because prompts show them."""
    lower_end: bool = True
    """Speedups are the interval's lower end."""
    seed: int = 0
    stage: str = "contrastive"
    """What a step does; see `learner.stage`."""
    config_digest: str = ""
    start_timeout_s: float = 300.0
    store_timeout_s: float = 60.0
    seed_timeout_s: float = 600.0
    generate_timeout_s: float = 600.0
    evaluate_timeout_s: float = 300.0
    learn_timeout_s: float = 1800.0
    publish_timeout_s: float = 300.0
    grace_s: float = 30.0

    def capacity(self, step: int, alive: int, in_progress: int) -> int:
        """Groups that may be formed now: `alive` are trained or may still be, `in_progress` of them are not whole."""
        state = StalenessState(
            self.groups_per_step, self.max_staleness, self.concurrent_groups, version=step, running=in_progress,
            accepted=alive - in_progress,
        )  # fmt: skip
        return state.capacity
