"""The engine's thread, tried with a stepper whose every step is scripted."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rollout.engines import Completion, EngineDied, GenerationRequest, SafetensorsFiles, WeightsError
from rollout.engines.base import WeightSource
from rollout.engines.stepped import StepOutput, SteppedEngine, StepRequest
from tasks.records import PolicyVersion, Prompt

SOURCE = SafetensorsFiles((Path("weights"),))


class Scripted:
    """Gives every sample token 7 each step, `length` tokens in all; records what is asked of it."""

    name = "scripted"

    def __init__(self, length: int = 3, max_rows: int = 100) -> None:
        self.length, self.max_rows = length, max_rows
        self.inside: dict[str, int] = {}
        self.log: list[str] = []
        self.salts: list[str] = []
        self.most_inside = 0
        self.gate = threading.Event()
        self.gate.set()
        self.fail_at_step: int | None = None
        self.steps = 0
        self.threads: set[int] = set()

    def admit(self, request: StepRequest) -> None:
        self.inside[request.id] = 0
        self.salts.append(request.cache_salt)
        self.most_inside = max(self.most_inside, len(self.inside))

    def step(self) -> list[StepOutput]:
        self.gate.wait(20)
        time.sleep(0.001)
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.steps == self.fail_at_step:
            raise RuntimeError("device on fire")
        outputs = []
        for id_ in list(self.inside):
            self.inside[id_] += 1
            last = self.inside[id_] == self.length
            if last:
                del self.inside[id_]
            outputs.append(StepOutput(id_, (7,), (-0.5,), "length" if last else None))
        return outputs

    def abort(self, ids: Sequence[str]) -> None:
        for id_ in ids:
            self.inside.pop(id_, None)
        self.log.append(f"abort {len(ids)}")

    def begin_update(self) -> None:
        self.log.append("begin")

    def load_weights(self, source: WeightSource) -> None:
        if source is not SOURCE:
            raise WeightsError("do not fit")
        self.log.append("load")

    def finish_update(self) -> None:
        self.log.append("finish")

    def sleep(self) -> None:
        self.log.append("sleep")

    def wake(self) -> None:
        self.log.append("wake")

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def make_engine() -> Iterator[Callable[..., SteppedEngine]]:
    engines: list[SteppedEngine] = []

    def make(stepper: Scripted, stall_timeout_s: float = 20.0) -> SteppedEngine:
        engine = SteppedEngine(
            lambda: stepper,
            lambda ids: "x" * len(ids),
            version=PolicyVersion(),
            seed=1,
            stall_timeout_s=stall_timeout_s,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine._stepper.gate.set()  # type: ignore[attr-defined]
        asyncio.run(engine.close())


def _request(samples: int, id_: str = "p") -> GenerationRequest:
    prompt = Prompt(id=id_, run_id="r", task_id="t", task_hash="h", device_type="cpu", text="", token_ids=(1, 2))
    return GenerationRequest(prompt, tuple(range(samples)))


async def _all(engine: SteppedEngine, *requests: GenerationRequest) -> list[Completion]:
    return [one async for one in engine.generate(requests)]


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


def test_every_sample_leaves_once_with_its_tokens(make_engine: Callable[..., SteppedEngine]) -> None:
    stepper = Scripted(length=3)
    completions = asyncio.run(_all(make_engine(stepper), _request(4, "a"), _request(2, "b")))
    assert sorted((one.prompt_id, one.index) for one in completions) == [("a", i) for i in range(4)] + [
        ("b", 0),
        ("b", 1),
    ]
    assert completions[0] == Completion(
        completions[0].prompt_id, completions[0].index, "xxx", (7, 7, 7), (-0.5,) * 3, (PolicyVersion(),), "length"
    )
    assert len(stepper.threads) == 1


def test_calls_at_once_share_the_engine(make_engine: Callable[..., SteppedEngine]) -> None:
    stepper = Scripted(length=5)
    engine = make_engine(stepper)

    async def run() -> list[list[Completion]]:
        return list(await asyncio.gather(_all(engine, _request(3, "a")), _all(engine, _request(3, "b"))))

    first, second = asyncio.run(run())
    assert {one.prompt_id for one in first} == {"a"}
    assert {one.prompt_id for one in second} == {"b"}


def test_no_more_samples_inside_than_rows(make_engine: Callable[..., SteppedEngine]) -> None:
    stepper = Scripted(max_rows=4)
    assert len(asyncio.run(_all(make_engine(stepper), _request(11)))) == 11
    assert stepper.most_inside == 4


def test_versions_follow_the_tokens_through_an_update(make_engine: Callable[..., SteppedEngine]) -> None:
    """Tokens before the update carry 0.0, those after it 0.1; a sample begun later has one version and its salt."""
    stepper = Scripted(length=100)
    engine = make_engine(stepper)

    async def run() -> tuple[Completion, Completion]:
        running = asyncio.create_task(_all(engine, _request(1, "old")))
        await _until(lambda: stepper.steps > 5)
        await engine.begin_update()
        held_at = stepper.steps
        later = asyncio.create_task(_all(engine, _request(1, "new")))
        await engine.load_weights(SOURCE)
        await asyncio.sleep(0.05)
        assert stepper.steps == held_at, "a step ran while weights were loaded"
        assert engine.policy_version == PolicyVersion()
        await engine.finish_update(PolicyVersion(step=1))
        return (await running)[0], (await later)[0]

    old, new = asyncio.run(run())
    steps = [version.step for version in old.policy_versions]
    assert len(steps) == 100
    assert steps == sorted(steps)
    assert set(steps) == {0, 1}
    assert new.policy_versions == (PolicyVersion(step=1),)
    assert stepper.salts == ["0.0", "0.1"]
    assert stepper.log == ["begin", "load", "finish"]


def test_weights_outside_an_update_are_refused(make_engine: Callable[..., SteppedEngine]) -> None:
    engine = make_engine(Scripted())
    with pytest.raises(RuntimeError, match="outside begin_update"):
        asyncio.run(engine.load_weights(SOURCE))
    with pytest.raises(RuntimeError, match="outside begin_update"):
        asyncio.run(engine.finish_update(PolicyVersion(step=1)))


def test_weights_that_do_not_fit_can_be_followed_by_others(make_engine: Callable[..., SteppedEngine]) -> None:
    engine = make_engine(Scripted())

    async def run() -> list[Completion]:
        await engine.begin_update()
        with pytest.raises(WeightsError):
            await engine.load_weights(SafetensorsFiles((Path("other"),)))
        await engine.load_weights(SOURCE)
        await engine.finish_update(PolicyVersion(step=1))
        return await _all(engine, _request(1))

    assert asyncio.run(run())[0].policy_versions == (PolicyVersion(step=1),)


def test_closing_the_iterator_cancels_the_rest(make_engine: Callable[..., SteppedEngine]) -> None:
    stepper = Scripted(length=10**9, max_rows=2)
    engine = make_engine(stepper)

    async def run() -> None:
        drawing = asyncio.create_task(_all(engine, _request(5)))
        await _until(lambda: len(stepper.inside) == 2)
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing
        await _until(lambda: not stepper.inside)
        steps = stepper.steps
        await asyncio.sleep(0.02)
        assert stepper.steps <= steps + 1, "the three that waited were admitted after all"

    asyncio.run(run())
    assert stepper.log == ["abort 2"]


def test_cancelling_at_once_leaves_nothing_behind(make_engine: Callable[..., SteppedEngine]) -> None:
    """The caller may be cancelled before it hears that its samples were taken in."""
    stepper = Scripted(length=10**9)
    engine = make_engine(stepper)

    async def run() -> None:
        for _ in range(20):
            drawing = asyncio.create_task(_all(engine, _request(1)))
            await asyncio.sleep(0)
            drawing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await drawing
        await _until(lambda: not stepper.inside and not engine._pending)
        await asyncio.sleep(0.02)
        assert not stepper.inside

    asyncio.run(run())


def test_a_failing_step_ends_every_generate(make_engine: Callable[..., SteppedEngine]) -> None:
    stepper = Scripted(length=10)
    stepper.fail_at_step = 4
    engine = make_engine(stepper)

    async def run() -> list[object]:
        return list(await asyncio.gather(_all(engine, _request(2)), _all(engine, _request(2)), return_exceptions=True))

    results = asyncio.run(run())
    assert all(isinstance(one, EngineDied) and "device on fire" in str(one) for one in results)
    with pytest.raises(EngineDied, match="device on fire"):
        asyncio.run(_all(engine, _request(1)))
    with pytest.raises(EngineDied, match="device on fire"):
        asyncio.run(engine.begin_update())


def test_a_step_that_never_ends_is_a_dead_engine(make_engine: Callable[..., SteppedEngine]) -> None:
    stepper = Scripted()
    stepper.gate.clear()
    engine = make_engine(stepper, stall_timeout_s=0.1)
    with pytest.raises(EngineDied, match=r"rollout\.stall_timeout_s"):
        asyncio.run(_all(engine, _request(1)))
    with pytest.raises(EngineDied, match=r"rollout\.stall_timeout_s"):
        asyncio.run(engine.begin_update())


def test_a_long_update_is_no_stall(make_engine: Callable[..., SteppedEngine]) -> None:
    engine = make_engine(Scripted(), stall_timeout_s=0.1)

    async def run() -> list[Completion]:
        await engine.begin_update()
        drawing = asyncio.create_task(_all(engine, _request(1)))
        await asyncio.sleep(0.4)
        await engine.finish_update(PolicyVersion(step=1))
        return await drawing

    assert len(asyncio.run(run())) == 1


def test_sleep_waits_for_the_samples_in_flight(make_engine: Callable[..., SteppedEngine]) -> None:
    stepper = Scripted(length=30)
    engine = make_engine(stepper)

    async def run() -> None:
        drawing = asyncio.create_task(_all(engine, _request(2)))
        await _until(lambda: stepper.steps > 2)
        await engine.sleep()
        assert drawing.done() or not stepper.inside
        assert len(await drawing) == 2
        steps = stepper.steps
        later = asyncio.create_task(_all(engine, _request(1)))
        await asyncio.sleep(0.05)
        assert stepper.steps == steps, "a sleeping engine stepped"
        await engine.wake()
        assert len(await later) == 1

    asyncio.run(run())
    assert stepper.log == ["sleep", "wake"]


def test_an_update_wakes_a_sleeping_engine(make_engine: Callable[..., SteppedEngine]) -> None:
    stepper = Scripted()
    engine = make_engine(stepper)

    async def run() -> list[Completion]:
        await engine.sleep()
        await engine.begin_update()
        await engine.load_weights(SOURCE)
        await engine.finish_update(PolicyVersion(step=1))
        return await _all(engine, _request(1))

    assert len(asyncio.run(run())) == 1
    assert stepper.log == ["sleep", "wake", "begin", "load", "finish"]


def test_closing_ends_what_waits() -> None:
    stepper = Scripted(length=10**9)
    engine = SteppedEngine(lambda: stepper, lambda ids: "", version=PolicyVersion(), seed=0, stall_timeout_s=20)

    async def run() -> None:
        drawing = asyncio.create_task(_all(engine, _request(1)))
        await _until(lambda: stepper.steps > 2)
        await engine.close()
        with pytest.raises(EngineDied, match="closed"):
            await drawing
        await engine.close()

    asyncio.run(run())
    assert stepper.log == ["close"]


def test_what_a_stepper_raises_at_its_start_reaches_the_caller() -> None:
    def fail() -> Scripted:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        SteppedEngine(fail, lambda ids: "", version=PolicyVersion(), seed=0, stall_timeout_s=1)
