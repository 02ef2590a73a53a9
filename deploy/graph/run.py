"""One run on a cluster: places the roles, starts their actors, follows the coordinator to its end.

Invariants: everything is started in one order and ended in the other; whatever ends this process ends the actors and
the embedded store with it; a dead coordinator is started again and replays.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.config import Config
from deploy.folder import RunFolder
from deploy.graph.actors import CoordinatorActor, RecorderActor
from deploy.graph.cluster import joined, named_address, nodes_of, requests_of
from deploy.graph.evaluators import places
from deploy.graph.held_out import HeldOutPrompt
from deploy.graph.placement import make_plan
from deploy.graph.plan import RunPlan
from deploy.graph.tools import Rules, Tools
from exemplar_store import ExemplarStore, RunStream
from exemplar_store.errors import StoreUsageError
from learner.publish import publish_folders
from tasks.errors import KontrastError
from tasks.integrity import check_integrity
from tasks.records import Task

_log = logging.getLogger(__name__)
POLL_S = 1.0


class RunFailed(KontrastError):
    """An actor could not start, or the run ended by an error that names no remedy of its own."""

    exit_code = 3


@dataclass
class Workers:
    """The actors of the other packages, and how the recorder reaches the evaluators.

    Actors are passed on by name: an actor that Ray restarts then finds them again whatever became of the process that
    made its arguments.
    """

    generators: Sequence[str]
    learner: str
    make_tools: Callable[[], Tools]
    actors: Sequence[Any] = ()
    """Handles that keep the actors alive; what is ended with the run."""


@dataclass(frozen=True)
class Setting:
    """What workers are built from."""

    config: Config
    run: RunFolder
    plan: RunPlan
    tasks: Mapping[str, Task]
    location: str
    """Where the store is reached from every node of the run."""
    source: str
    """Hash of the source that every actor must have."""

    def actor_name(self, role: str, number: int = 0) -> str:
        """Name of an actor; one run has one actor of each name in a cluster."""
        return f"{self.run.run_id}/{role}-{number}"


MakeWorkers = Callable[[Any, Setting], Workers]
Reader = Callable[[int], Iterator[dict[str, Any]]]


def run_plan(
    config: Config, run_id: str, tasks: Sequence[Task], held_out: Mapping[str, Sequence[Task]] | None = None
) -> RunPlan:
    """The coordinator's numbers from the configuration; `held_out` are the tasks of each held-out set."""
    cluster, learner = config.cluster, config.learner
    types = list(config.device_types())
    candidates = config.evaluator.candidates_at_once
    at_once = sum(count * places(device_type, candidates) for device_type, count in config.device_types().items())
    shown = {"with_exemplars": (True,), "without_exemplars": (False,), "both": (True, False)}[config.held_out.prompts]
    return RunPlan(
        run_id=run_id,
        targets=tuple((task.id, device_type) for task in tasks for device_type in types),
        steps=learner.steps,
        groups_per_step=learner.groups.groups_per_step,
        samples_per_group=config.rollout.sampling.group_size,
        turns=config.rollout.turns,
        max_groups=config.run.max_groups,
        give_up_after=config.run.give_up_after,
        max_staleness=config.rollout.staleness.max_staleness,
        concurrent_groups=config.rollout.staleness.max_groups_in_flight,
        concurrent_scores=2 * at_once,
        concurrent_seeds=at_once,
        seeds=config.run.seed_kernels != "none",
        confirm=config.run.confirm,
        confirm_above=max(1.0, config.run.require_speedup),
        controls=config.evaluator.control_every > 0,
        partial_steps=config.run.partial_steps,
        take_turns=cluster.take_turns,
        attempts=cluster.attempts,
        held_out=tuple(
            HeldOutPrompt(name, task.id, device_type, exemplars)
            for name, found in (held_out or {}).items()
            for exemplars in shown
            for task in found
            for device_type in types
        ),
        eval_every=config.held_out.eval_every,
        held_out_samples=config.held_out.samples,
        held_out_seeds=config.held_out.eval_every > 0 and True in shown,
        lower_end=config.learner.reward.pays_lower_end(config.evaluator.protocol),
        seed=config.run.seed,
        stage=learner.stage,
        config_digest=config.digest(),
        start_timeout_s=cluster.start_timeout_s,
        store_timeout_s=cluster.store_timeout_s,
        seed_timeout_s=cluster.seed_timeout_s,
        generate_timeout_s=cluster.generate_timeout_s,
        evaluate_timeout_s=cluster.evaluate_timeout_s,
        learn_timeout_s=cluster.learn_timeout_s,
        publish_timeout_s=cluster.publish_timeout_s,
        grace_s=cluster.grace_s,
    )


def execute(
    config: Config,
    run: RunFolder,
    tasks: Sequence[Task],
    make_workers: MakeWorkers,
    follow: Callable[[RunPlan, Reader], Callable[[], object]],
    say: Callable[[str], object] = _log.info,
    held_out: Mapping[str, Sequence[Task]] | None = None,
) -> None:
    """Runs to the end, measuring on the held-out sets. `follow(plan, read)` gives what is called about once a second,
    and once more at the end; `say` gets a line for each stage of the start.

    Raises KontrastError for whatever a person has to change; a run that ended so can be resumed.
    """
    source = check_integrity()
    plan = run_plan(config, run.run_id, tasks, held_out)
    by_id = {task.id: task for task in [*tasks, *(task for found in (held_out or {}).values() for task in found)]}
    say(f"{'joining' if named_address(config, os.environ) else 'starting'} Ray")
    with joined(config, run.logs, folders=publish_folders(config.learner.publish, run.run_id)) as ray:
        nodes = nodes_of(ray)
        make_plan(requests_of(config), nodes).require()
        if not config.store.location and len(nodes) > 1:
            raise StoreUsageError(
                f"The cluster has {len(nodes)} nodes, and the embedded store serves this one only: "
                f"set store.location to the URL of a Redis server."
            )
        with ExemplarStore.connect(config.store.location or run.store, config.store) as store:
            location = config.store.location if "://" in config.store.location else store.url
            setting = Setting(config, run, plan, by_id, location, source)
            say("starting generators, evaluators and learner")
            workers = make_workers(ray, setting)
            try:
                _lead(ray, setting, workers, follow(plan, stream_reader(store, run.run_id)))
            finally:
                for actor in workers.actors:
                    ray.kill(actor)
                remove_weights(config, run.run_id)


def remove_weights(config: Config, run_id: str) -> None:
    """Removes what a learner on this node has published through files: it may lie in memory, as /dev/shm does."""
    for folder in publish_folders(config.learner.publish, run_id):
        shutil.rmtree(folder, ignore_errors=True)


def _lead(ray: Any, setting: Setting, workers: Workers, watch: Callable[[], object]) -> None:
    config = setting.config
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    options = {
        "num_cpus": 0, "max_restarts": config.cluster.restarts, "max_task_retries": 0, "max_concurrency": 1000,
        "scheduling_strategy": here,
    }  # fmt: skip
    rules = Rules(
        config.evaluator.protocol, config.evaluator.rules,
        one_seed_per_speed=config.run.seed_kernels == "one_per_speed", keep_samples=config.run.keep_samples,
        seed=config.run.seed, confirm_above=config.evaluator.timing.confirm_above, evaluators=config.device_types(),
        max_bias=config.evaluator.control_bias, review=config.review,
    )  # fmt: skip
    recorder_name = setting.actor_name("recorder")
    recorder = ray.remote(RecorderActor).options(name=recorder_name, **options).remote(
        setting.run.resolved(), setting.location, config.store, setting.tasks, workers.make_tools, rules,
        setting.source,
    )  # fmt: skip
    coordinator = ray.remote(CoordinatorActor).options(name=setting.actor_name("coordinator"), **options).remote(
        setting.plan, setting.location, config.store, recorder_name, workers.generators, workers.learner,
        setting.source,
    )  # fmt: skip
    try:
        with _stopping(lambda: coordinator.stop.remote()):
            _await_end(ray, coordinator, watch)
    finally:
        for actor in (coordinator, recorder):
            ray.kill(actor)


def _await_end(ray: Any, coordinator: Any, watch: Callable[[], object]) -> None:
    result, warned = coordinator.run.remote(), False
    while True:
        done, _ = ray.wait([result], timeout=POLL_S)
        watch()
        if not done:
            continue
        try:
            ray.get(result)
        except ray.exceptions.RayActorError as error:
            state = "" if error is None else str(error).strip().splitlines()[0]
            if isinstance(error, ray.exceptions.ActorDiedError) and not _restarts(ray, coordinator):
                raise RunFailed(f"The coordinator died too often ({state}): look at its log, then --resume.") from error
            if not warned:
                _log.warning("the coordinator died and is started again: %s", state)
            warned = True
            time.sleep(POLL_S)
            result = coordinator.run.remote()
            continue
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from error
        watch()
        return


def _restarts(ray: Any, actor: Any) -> bool:
    """True when Ray starts the dead actor again; False also where there is no dashboard to ask."""
    from ray.util.state import get_actor
    from ray.util.state.exception import RayStateApiException

    with contextlib.suppress(ray.exceptions.RayError, RayStateApiException, OSError, RuntimeError):
        found = get_actor(actor._actor_id.hex())
        return found is not None and found.state != "DEAD"
    return False


def cause_of(error: Any) -> Exception:
    """What a failed call of an actor is raised as here."""
    cause = error.cause if getattr(error, "cause", None) is not None else error
    if isinstance(cause, KontrastError):
        return cause
    last = str(cause).strip().splitlines()[-1] if str(cause).strip() else type(cause).__name__
    return RunFailed(f"The run ended by {type(cause).__name__}: {last}. It can be resumed; logs lie in the run folder.")


@contextlib.contextmanager
def _stopping(stop: Callable[[], object]) -> Iterator[None]:
    """SIGINT and SIGTERM ask the run to end in order; a second one ends it at once."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:  # noqa: ARG001 - the signal module's signature
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        stop()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stream_reader(store: ExemplarStore, run_id: str) -> Reader:
    """Reads a run's events from a number on, remembering where it was."""
    key = store.keys.run(run_id, "events")
    position: dict[int, str] = {0: "-"}

    def read(number: int) -> Iterator[dict[str, Any]]:
        start, at = position.get(number), number
        if start is None:
            raise ValueError(f"events are read in order, and {number} is not where the last reading ended")
        while page := store.connection.call("XRANGE", key, start, "+", "COUNT", 500):
            for entry_id, fields in page:
                start, at = f"({entry_id.decode()}", at + 1
                position.clear()
                position[at] = start
                yield json.loads(fields[b"event"])

    return read


def open_stream(location: str | Path, config: Config, run_id: str) -> RunStream:
    """A run's stream by the store's place; for commands that look at a run from outside."""
    return RunStream(ExemplarStore.connect(location, config.store), run_id)
