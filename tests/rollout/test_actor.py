from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout.actor import ENGINE_DIED_EXIT_CODE, Generator, generator_actor
from rollout.config import RolloutConfig
from rollout.engines import Completion, EngineDied, GenerationRequest, SafetensorsFiles
from tasks.records import PolicyVersion, Prompt, Sample


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ours = not ray.is_initialized()
    if ours:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    yield ray
    if ours:
        ray.shutdown()


class DyingEngine:
    name = "dying"
    policy_version = PolicyVersion()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        yield Completion(requests[0].prompt.id, 0, "", (1,), (0.0,), (PolicyVersion(),), "stop")
        raise EngineDied("the engine died: on purpose")


class DyingGenerator(Generator):
    async def ready(self) -> dict[str, Any]:
        self._engine = DyingEngine()  # type: ignore[assignment]
        return {"engine": "dying"}


def test_a_generator_gives_samples(
    tiny_model: Path, changed_weights: Path, tiny_config: RolloutConfig, prompt_of: Callable[..., Prompt]
) -> None:
    """The whole life without Ray: start under version 1.4, draw, take weights as 1.5, draw, close."""

    async def run() -> tuple[dict[str, Any], list[Sample], PolicyVersion]:
        generator = Generator(tiny_config, str(tiny_model), PolicyVersion(epoch=1, step=4))
        with pytest.raises(RuntimeError, match="before ready"):
            await generator.policy_version()
        facts = await generator.ready()
        request = GenerationRequest(prompt_of(tuple(range(20))), (0, 1))
        samples = [one async for one in generator.generate([request])]
        await generator.begin_update()
        await generator.load_weights(SafetensorsFiles((changed_weights,)))
        await generator.finish_update(PolicyVersion(epoch=1, step=5))
        await generator.sleep()
        await generator.wake()
        version = await generator.policy_version()
        await generator.close()
        return facts, samples, version

    facts, samples, version = asyncio.run(run())
    assert facts["engine"] == "transformers"
    assert sorted(one.id for one in samples) == ["p/0", "p/1"]
    assert all(one.policy_versions == (PolicyVersion(epoch=1, step=4),) for one in samples)
    assert all(one.candidate is None for one in samples), "random bytes are no kernel"
    assert version == PolicyVersion(epoch=1, step=5)


def test_a_dead_engine_ends_the_process(prompt_of: Callable[..., Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise SystemExit

    monkeypatch.setattr("rollout.actor.os._exit", leave)
    monkeypatch.setattr("rollout.actor.logging.shutdown", lambda: None)

    async def run() -> None:
        generator = DyingGenerator(RolloutConfig())
        await generator.ready()
        async for _ in generator.generate([GenerationRequest(prompt_of((1,)), (0, 1))]):
            pass

    with pytest.raises(SystemExit):
        asyncio.run(run())
    assert codes == [ENGINE_DIED_EXIT_CODE]


@pytest.mark.heavy
def test_samples_stream_out_of_the_actor(
    ray: Any, tiny_model: Path, tiny_config: RolloutConfig, prompt_of: Callable[..., Prompt]
) -> None:
    actor = generator_actor().options(num_cpus=1).remote(tiny_config, str(tiny_model))
    ray.get(actor.ready.remote(), timeout=120)
    request = GenerationRequest(prompt_of(tuple(range(20))), (3, 4, 5))
    stream = actor.generate.options(num_returns="streaming").remote([request])
    samples = [ray.get(reference, timeout=60) for reference in stream]
    assert sorted(one.index for one in samples) == [3, 4, 5]
    ray.kill(actor)


@pytest.mark.heavy
def test_ray_sees_a_dead_actor_when_the_engine_dies(ray: Any, prompt_of: Callable[..., Prompt]) -> None:
    actor = ray.remote(DyingGenerator).options(num_cpus=0).remote(RolloutConfig())
    ray.get(actor.ready.remote(), timeout=120)
    stream = actor.generate.options(num_returns="streaming").remote([GenerationRequest(prompt_of((1,)), (0, 1))])
    with pytest.raises(ray.exceptions.RayError):
        ray.get(list(stream), timeout=60)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.policy_version.remote(), timeout=60)
