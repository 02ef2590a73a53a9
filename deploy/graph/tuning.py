"""Stage 1 on a cluster: builds the data, starts the learner's ranks, follows the loss curve to the end.

Invariants: the data is built once, in this process, before anything is placed; a rank that dies takes the others with
it, and all start again from the latest checkpoint; each line of the curve is followed once, in order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deploy.config import Config
from deploy.folder import RunFolder
from deploy.graph.cluster import joined, nodes_of, requests_of
from deploy.graph.placement import make_plan
from deploy.graph.run import POLL_S, RunFailed, cause_of
from deploy.graph.workers import rank_options
from learner.sft_pairs import Recipe, load_or_build

_log = logging.getLogger(__name__)
CURVE = "sft.jsonl"
PAIRS = "pairs.jsonl.gz"
Line = dict[str, Any]


class Curve:
    """The loss curve as it grows. A resumed run may cut lines and write them again: none is given twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = 0

    def fresh(self) -> Iterator[Line]:
        """The lines of steps that were not given yet."""
        if not self._path.is_file():
            return
        for text in self._path.read_text().splitlines(keepends=True):
            if text.endswith("\n") and (line := json.loads(text))["step"] >= self._next:
                self._next = line["step"] + 1
                yield line


def tune(
    config: Config, run: RunFolder, say: Callable[[str], object], follow: Callable[[Line], object]
) -> dict[str, Any]:  # fmt: skip
    """Runs stage 1 to its end, from its latest checkpoint; returns its report.

    `follow` gets each line of the loss curve. Raises KontrastError for whatever a person has to change.
    """
    from learner.sft_actor import sft_actor

    prompt = config.rollout.prompt
    recipe = Recipe(
        config.learner.sft, Path(config.learner.policy.model), template=prompt.template, style=prompt.kernel_style
    )
    say("building the pairs of prompt and kernel")
    pairs = load_or_build(recipe, run.path / PAIRS)
    left = ", ".join(f"{count} {reason}" for reason, count in sorted(pairs.left_out.items()))
    say(
        f"{len(pairs.train)} pairs, {len(pairs.held_out)} held out"
        + (f"; demonstrations left out: {left}" if left else "")
    )
    curve = Curve(run.path / CURVE)
    with joined(config) as ray:
        needed = [request for request in requests_of(config) if request.role == "learner"]
        make_plan(needed, nodes_of(ray)).require()
        say("starting the learner")
        for attempt in range(1, config.cluster.attempts + 1):
            ranks = [
                sft_actor().options(**options).remote(
                    config.learner, str(run.path.resolve()), str((run.path / PAIRS).resolve()), run.run_id,
                    rank=rank, world=config.cluster.learner_ranks,
                )
                for rank, options in enumerate(rank_options(ray, config, restarts=0))
            ]  # fmt: skip
            try:
                return _await(ray, ranks, config, curve, follow)
            except ray.exceptions.RayError as error:
                _log.warning("a rank of the learner died, attempt %d: %s", attempt, str(error).strip().splitlines()[0])
                if attempt == config.cluster.attempts:
                    raise RunFailed(
                        f"The learner died {attempt} times. Memory is the usual cause: lower "
                        f"learner.deepspeed.row_tokens, or free some; then go on with --resume."
                    ) from error
            finally:
                for rank in ranks:
                    ray.kill(rank)
    raise RunFailed("cluster.attempts must be at least 1.")


def _await(
    ray: Any, ranks: list[Any], config: Config, curve: Curve, follow: Callable[[Line], object]
) -> dict[str, Any]:
    """The first rank's report, once all have ended."""
    address = ""
    if len(ranks) > 1:
        address = ray.get(ranks[0].address.remote(), timeout=config.cluster.start_timeout_s)
    results = [rank.run.remote(address) for rank in ranks]
    waiting = list(results)
    while waiting:
        done, waiting = ray.wait(waiting, timeout=POLL_S)
        for line in curve.fresh():
            follow(line)
        try:
            ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from error
    for line in curve.fresh():
        follow(line)
    report: dict[str, Any] = ray.get(results[0])
    return report
