"""Training from a file of scored groups: the learner alone, without generators, evaluators and store.

Invariants: the learner is the run's own, checkpoints and resume included; the groups are given in the file's order; a
learner that dies is started again and goes on from its checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deploy.config import Config
from deploy.folder import RunFolder
from deploy.graph.cluster import joined, nodes_of, requests_of
from deploy.graph.placement import make_plan
from deploy.graph.run import RunFailed, cause_of
from deploy.graph.workers import await_ready, start_learner
from learner.loop import Learned, Standing
from learner.rollouts import OpenRollouts, read_groups

_log = logging.getLogger(__name__)
STEPS = "steps.jsonl"
"""File of the run that holds a line of figures for each step."""
STARTS = "starts.txt"


def replay_rollouts(
    config: Config, run: RunFolder, path: Path, say: Callable[[str], object],
    follow: Callable[[int, Mapping[str, float]], object],
) -> dict[str, Any]:  # fmt: skip
    """Trains until the configured steps are done or the groups are used up; returns a summary.

    `follow` gets each step with its figures. Raises KontrastError.
    """
    count = sum(1 for _ in read_groups(path))
    say(f"{count} groups in {path}")
    with joined(config) as ray:
        needed = [request for request in requests_of(config) if request.role == "learner"]
        make_plan(needed, nodes_of(ray)).require()
        say("starting the learner")
        stream = OpenRollouts(str(path.resolve()), run.run_id, str(run.path.resolve() / STARTS))
        learner = start_learner(ray, config, run, stream, f"{run.run_id}/learner-0")
        try:
            await_ready(ray, {"the learner": [learner.ready]}, config)
            standing = _learn(ray, learner, config, run, count, follow)
        finally:
            ray.kill(learner)
    fates = Counter(standing.fates.values())
    return {"run_id": run.run_id, "status": "finished", "groups": count, "step": standing.step, "fates": dict(fates)}


def _learn(
    ray: Any, learner: Any, config: Config, run: RunFolder, count: int,
    follow: Callable[[int, Mapping[str, float]], object],
) -> Standing:  # fmt: skip
    limit, losses, turns = config.cluster.learn_timeout_s, 0, 0
    steps = _Steps(run.path / STEPS)
    standing: Standing = ray.get(learner.standing.remote(), timeout=limit)
    steps.cut(standing.step)
    while standing.step < config.learner.steps:
        # Each turn takes one group from the file; after as many turns as groups there is only the rest to use up.
        used_up = turns > count
        try:
            learned: Learned = ray.get(learner.learn.remote(partial=used_up), timeout=limit)
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from error
        except ray.exceptions.RayActorError as error:
            losses += 1
            _log.warning("the learner died (%s); it goes on from its latest checkpoint", error)
            if losses > config.cluster.attempts:
                raise RunFailed(
                    f"The learner died {losses} times. Memory is the usual cause: lower "
                    f"learner.deepspeed.row_tokens, or free some; then go on with --resume."
                ) from error
            turns = 0
            standing = _standing_again(ray, learner, config)
            steps.cut(standing.step)
            continue
        turns += 1
        standing = learned.standing
        if learned.stepped:
            steps.add(standing.step, learned.metrics)
            follow(standing.step, learned.metrics)
        elif used_up:
            break
    ray.get(learner.checkpoint.remote(), timeout=limit)
    return standing


def _standing_again(ray: Any, learner: Any, config: Config) -> Standing:
    """Where a restarted learner stands, once it is back."""
    for attempt in range(1, config.cluster.attempts + 1):
        try:
            standing: Standing = ray.get(learner.standing.remote(), timeout=config.cluster.start_timeout_s)
            return standing
        except ray.exceptions.RayActorError as error:
            if attempt == config.cluster.attempts:
                raise RunFailed(f"The learner does not start again: {error}") from error
    raise RunFailed("cluster.attempts must be at least 1.")


class _Steps:
    """The figures of each step of the surviving lineage, as JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def cut(self, step: int) -> None:
        """Takes out what lies beyond a step that the learner went back to."""
        if self._path.is_file():
            lines = [line for line in self._path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            partial = self._path.with_suffix(".partial")
            partial.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
            partial.replace(self._path)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Appends a step."""
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **figures}, sort_keys=True) + "\n")
