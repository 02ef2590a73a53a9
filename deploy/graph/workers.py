"""The real workers of a run: generators, evaluators and learner, placed as the configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from deploy.config import Config
from deploy.folder import RunFolder
from deploy.graph.evaluators import CONFIRMATION, EXPLORATION, EvaluatorPool, open_evaluator, start_evaluators
from deploy.graph.generating import GeneratorActor
from deploy.graph.handles import PromptRefused
from deploy.graph.reviewing import ask_actor, start_reviewer
from deploy.graph.run import RunFailed, Setting, Workers
from deploy.graph.state import Group
from deploy.graph.tools import Seed, Tools
from exemplar_store import ExemplarStore, RunStream, StoreConfig
from learner.loop import GroupStream
from learner.rollouts import OpenDumping
from rollout import PromptTooLong, build_prompt
from rollout.tokenizer import Tokenizer
from rollout.turns import next_turn
from tasks.errors import UsageError
from tasks.records import Candidate, Evaluation, Exemplar, Prompt, Task

ROLLOUTS = "rollouts.jsonl"
"""File of a run that holds its scored groups, where they are asked for."""


def prepare(config: Config) -> Config:
    """The configuration with the model's folder in it, converted on first use; raises UsageError without a model."""
    from rollout.model import prepare_model

    folder = str(prepare_model(config.rollout.model, Path(config.rollout.model_cache).expanduser()))
    adapter = find_adapter(config.learner.policy.adapter)
    policy = config.learner.policy.model_copy(update={"model": folder, "adapter": adapter})
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"model": folder}),
            "learner": config.learner.model_copy(update={"policy": policy}),
        }
    )


def find_adapter(name: str) -> str:
    """Folder of an adapter; `preset:NAME` is one that comes with the package. Raises UsageError when there is none."""
    prefix = "preset:"
    if not name.startswith(prefix):
        return name
    folder = Path(str(resources.files("deploy.presets"))) / name.removeprefix(prefix)
    if not folder.is_dir():
        raise UsageError(
            f"No adapter {name} comes with this version: set learner.policy.adapter to a folder, or empty."
        )
    return str(folder)


def make_workers(ray: Any, setting: Setting) -> Workers:
    """Starts all workers and waits until they are ready; raises RunFailed naming the one that is not."""
    config, cluster = setting.config, setting.config.cluster
    names = [setting.actor_name("generator", number) for number in range(cluster.generators)]
    generators = [
        ray.remote(GeneratorActor)
        .options(
            name=name, num_cpus=cluster.generator_cpus, num_gpus=cluster.generator_gpus, max_concurrency=1000,
            max_restarts=cluster.restarts, max_task_retries=0,
        )
        .remote(config.rollout, config.rollout.model, setting.source)
        for name in names
    ]  # fmt: skip
    by_type = {
        device_type: [setting.actor_name(f"evaluator-{device_type}", number) for number in range(count)]
        for device_type, count in config.device_types().items()
    }
    evaluators = start_evaluators(
        ray, by_type, setting.source,
        lambda device_type: open_evaluator(config.evaluator, "cpu" if device_type == "cpu" else "cuda"),
        cpus=cluster.evaluator_cpus, gpus=cluster.evaluator_gpus, restarts=cluster.restarts,
        candidates_at_once=config.evaluator.candidates_at_once,
    )  # fmt: skip
    stream: Callable[[], GroupStream] = OpenStream(setting.location, config.store, setting.run.run_id)
    if config.run.dump_rollouts:
        stream = OpenDumping(stream, str(setting.run.path.resolve() / ROLLOUTS))
    learner = start_learner(ray, config, setting.run, stream, setting.actor_name("learner"))
    await_ready(ray, {"a generator": [actor.ready for actor in generators], "the learner": [learner.ready]}, config)
    actors = [*generators, learner, *(actor for found in evaluators.values() for actor in found)]
    reviewer = ""
    if config.review.mode != "off":
        reviewer = setting.actor_name("reviewer")
        actors.append(start_reviewer(ray, config.review, reviewer, setting.source, restarts=cluster.restarts))
        await_ready(ray, {"the reviewer": [actors[-1].ready]}, config)
    tools = RealTools(config, setting.run.run_id, by_type, reviewer)
    return Workers(names, setting.actor_name("learner"), tools, actors)


@dataclass(frozen=True)
class OpenStream:
    """Opens a run's stream in another process."""

    location: str
    store: StoreConfig
    run_id: str

    def __call__(self) -> RunStream:
        """A stream of its own."""
        return RunStream(ExemplarStore.connect(self.location, self.store), self.run_id)


def start_learner(ray: Any, config: Config, run: RunFolder, stream: Callable[[], GroupStream], name: str) -> Any:
    """The learner's first rank, with the others on its node; returns its actor. `stream` opens what it learns from."""
    from learner.actor import learner_actor, rank_actor

    cluster = config.cluster
    world = cluster.learner_ranks
    placed = rank_options(ray, config, restarts=cluster.restarts)
    lead = (
        learner_actor()
        .options(name=name, **placed[0])
        .remote(config.learner, run.run_id, str(run.checkpoints.resolve()), stream, world=world, seed=config.run.seed)
    )
    if world > 1:
        address = ray.get(lead.address.remote(), timeout=cluster.start_timeout_s)
        for rank in range(1, world):
            follower = rank_actor().options(**placed[rank]).remote(
                config.learner, rank, world, address, seed=config.run.seed
            )  # fmt: skip
            follower.follow.remote()
    return lead


def rank_options(ray: Any, config: Config, *, restarts: int) -> list[dict[str, Any]]:
    """Options of the learner's ranks, which are placed on one node together."""
    cluster, world = config.cluster, config.cluster.learner_ranks
    options: dict[str, Any] = {
        "num_cpus": cluster.learner_cpus, "num_gpus": cluster.learner_gpus, "max_restarts": restarts,
        "max_task_retries": 0,
    }  # fmt: skip
    if world == 1:
        return [options]
    bundle = {"CPU": cluster.learner_cpus, "GPU": cluster.learner_gpus}
    group = ray.util.placement_group([bundle] * world, strategy="STRICT_PACK")
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    return [{**options, "scheduling_strategy": strategy(group, placement_group_bundle_index=n)} for n in range(world)]


def await_ready(ray: Any, asked: Mapping[str, Sequence[Any]], config: Config) -> None:
    """Waits for calls of each kind of worker; raises RunFailed, or what a worker raised."""
    limit = config.cluster.start_timeout_s
    for what, calls in asked.items():
        references = [call.remote() for call in calls]
        try:
            ray.get(references, timeout=limit)
        except ray.exceptions.GetTimeoutError as error:
            raise RunFailed(f"Waited {limit:g} s for {what} to start; raise cluster.start_timeout_s.") from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause if error.cause is not None else error from error
        except ray.exceptions.RayActorError as error:
            text = str(error).strip().splitlines()[-1]
            raise RunFailed(f"{what} did not start: {text}") from error


@dataclass(frozen=True)
class RealTools:
    """Makes the recorder's tools in the recorder's own process."""

    config: Config
    run_id: str
    evaluators: Mapping[str, Sequence[str]]
    """Names of the evaluator actors by device type."""
    reviewer: str = ""
    """Name of the reviewer's actor; empty where there is none."""

    def __call__(self) -> Tools:
        """Loads the tokenizer and takes hold of the evaluators."""
        import ray

        from rollout.tokenizer import ChatTokenizer

        tokenizer = ChatTokenizer.load(Path(self.config.rollout.model))
        actors = {kind: [ray.get_actor(name) for name in names] for kind, names in self.evaluators.items()}
        pool = EvaluatorPool(
            actors,
            attempts=self.config.cluster.attempts,
            control_every=self.config.evaluator.control_every,
            candidates_at_once=self.config.evaluator.candidates_at_once,
        )
        usual = self.config.evaluator.protocol

        async def evaluate(
            task: Task, candidate: Candidate, device_type: str, protocol: str, first: Evaluation | None = None
        ) -> Evaluation:
            priority = EXPLORATION if protocol == usual and first is None else CONFIRMATION
            return await pool.evaluate(task, candidate, device_type, protocol, priority=priority, first=first)

        return Tools(
            partial(self._prompt, tokenizer), known_seeds, evaluate, pool.control, pool.histories.__setitem__,
            ask_actor(ray.get_actor(self.reviewer)) if self.reviewer else None,
            lambda first, history: next_turn(first, history, tokenizer, self.config.rollout),
        )  # fmt: skip

    def _prompt(
        self, tokenizer: Tokenizer, task: Task, exemplars: Sequence[Exemplar], mates: Sequence[Sequence[Exemplar]],
        group: Group,
    ) -> Prompt:  # fmt: skip
        try:
            return build_prompt(
                task, exemplars, tokenizer, self.config.rollout, run_id=self.run_id, prompt_id=group.id,
                device_type=group.device_type, alternatives=mates, strategy=self.config.store.strategy,
            )  # fmt: skip
        except PromptTooLong as error:
            raise PromptRefused("prompt_too_long", str(error)) from error


def known_seeds(task: Task) -> list[Seed]:
    """Seed kernels of a procedural task; none for other suites."""
    from tasks.procedural import seed_kernels

    return [Seed(seed.name, seed.speed, seed.source) for seed in seed_kernels(task)]
