"""The real workers of a run: generators, evaluators and learner, placed as the configuration says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.config import Config
from deploy.graph.evaluators import CONFIRMATION, EXPLORATION, EvaluatorPool, open_evaluator, start_evaluators
from deploy.graph.generating import GeneratorActor
from deploy.graph.handles import PromptRefused
from deploy.graph.recorder import Seed, Tools
from deploy.graph.run import RunFailed, Setting, Workers
from deploy.graph.state import Group
from rollout import PromptTooLong, build_prompt
from tasks.records import Candidate, Evaluation, Exemplar, Prompt, Task

_log = logging.getLogger(__name__)


def prepare(config: Config) -> Config:
    """The configuration with the model's folder in it, converted on first use; raises UsageError without a model."""
    from rollout.model import prepare_model

    folder = str(prepare_model(config.rollout.model, Path(config.rollout.model_cache).expanduser()))
    policy = config.learner.policy.model_copy(update={"model": folder})
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"model": folder}),
            "learner": config.learner.model_copy(update={"policy": policy}),
        }
    )


def make_workers(ray: Any, setting: Setting) -> Workers:
    """Starts all workers and waits until they are ready; raises RunFailed naming the one that is not."""
    config, cluster = setting.config, setting.config.cluster
    again = {"max_restarts": cluster.restarts, "max_task_retries": 0}
    generators = [
        ray.remote(GeneratorActor)
        .options(num_cpus=cluster.generator_cpus, num_gpus=cluster.generator_gpus, max_concurrency=1000, **again)
        .remote(config.rollout, config.rollout.model, setting.source)
        for _ in range(cluster.generators)
    ]
    evaluators = start_evaluators(
        ray, config.device_types(), setting.source,
        lambda device_type: open_evaluator(config.evaluator, "cpu" if device_type == "cpu" else "cuda"),
        cpus=cluster.evaluator_cpus, gpus=cluster.evaluator_gpus, restarts=cluster.restarts,
    )  # fmt: skip
    learner = start_learner(ray, setting)
    _await_ready(ray, {"a generator": [actor.ready for actor in generators], "the learner": [learner.ready]}, config)
    actors = [*generators, learner, *(actor for found in evaluators.values() for actor in found)]
    return Workers(generators, learner, tools_of(config, setting.run.run_id, evaluators), lambda: _kill(ray, actors))


def _await_ready(ray: Any, asked: Mapping[str, Sequence[Any]], config: Config) -> None:
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


def _kill(ray: Any, actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


def tools_of(config: Config, run_id: str, evaluators: Mapping[str, Sequence[Any]]) -> Callable[[], Tools]:
    """What makes the recorder's tools in the recorder's own process."""

    def made() -> Tools:
        from rollout.tokenizer import ChatTokenizer

        from tasks.procedural import seed_kernels

        tokenizer = ChatTokenizer.load(Path(config.rollout.model))
        pool = EvaluatorPool(evaluators, attempts=config.cluster.attempts)

        def prompt(task: Task, exemplars: Sequence[Exemplar], group: Group) -> Prompt:
            try:
                return build_prompt(
                    task, exemplars, tokenizer, config.rollout, run_id=run_id, prompt_id=group.id,
                    device_type=group.device_type, strategy=config.store.strategy,
                )  # fmt: skip
            except PromptTooLong as error:
                raise PromptRefused("prompt_too_long", str(error)) from error

        def seeds(task: Task) -> list[Seed]:
            return [Seed(seed.name, seed.speed, seed.source) for seed in seed_kernels(task)]

        async def evaluate(task: Task, candidate: Candidate, device_type: str, protocol: str) -> Evaluation:
            priority = CONFIRMATION if protocol != config.evaluator.protocol else EXPLORATION
            return await pool.evaluate(task, candidate, device_type, protocol, priority=priority)

        return Tools(prompt, seeds, evaluate)

    return made
