"""The learner as a Ray actor: a thin shell, all logic is in `loop`, `ranks` and `publish`.

Invariants: trainer and stream are used by one thread, one call at a time; nothing is published while a step runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from learner import metrics
from learner.checkpoint import CheckpointFolder
from learner.config import LearnerConfig
from learner.errors import PublishError
from learner.loop import GroupStream, Learned, Learner, Standing
from learner.publish import Publication, create_publisher
from tasks.records import PolicyVersion

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LearnerProcess:
    """What the actor does, without Ray. Methods may be called again after a failure."""

    def __init__(
        self, config: LearnerConfig, run_id: str, checkpoints: str, connect: Callable[[], GroupStream], *,
        engine_bf16: bool | None = None, world: int = 1, seed: int = 0,
    ) -> None:  # fmt: skip
        """`connect` opens the run's stream in this process; `engine_bf16` says whether engines compute in it."""
        self._config = config
        self._run_id = run_id
        self._checkpoints = CheckpointFolder(Path(checkpoints), keep=config.checkpoint.keep)
        self._connect = connect
        self._engine_bf16 = engine_bf16
        self._world = world
        self._seed = seed
        self._address = ""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._lock = asyncio.Lock()
        self._learner: Learner | None = None

    async def address(self) -> str:
        """Where the other ranks meet this one; asked for before `ready` when there are several."""
        self._address = self._address or free_address()
        return self._address

    async def ready(self) -> dict[str, Any]:
        """Loads the model and resumes, on the first call."""
        async with self._lock:
            await self._in_thread(self._started)
        return {"pid": os.getpid()}

    async def standing(self) -> Standing:
        """Where the learner stands."""
        async with self._lock:
            return await self._in_thread(lambda: self._started().standing())

    async def learn(self, *, partial: bool = False) -> Learned:
        """See Learner."""
        async with self._lock:
            return await self._in_thread(lambda: self._started().learn(partial=partial))

    async def checkpoint(self) -> None:
        """See Learner."""
        async with self._lock:
            await self._in_thread(lambda: self._started().checkpoint())

    async def export(self, folder: str) -> str:
        """Writes adapter or model for `transformers`; returns its folder."""
        async with self._lock:
            await self._in_thread(self._started)
            return str(await self._in_thread(lambda: self._trainer.export(Path(folder))))

    async def publish(self, generators: Sequence[Any]) -> Publication:
        """Brings the current weights to the generators (Ray actors). Raises PublishError; may be repeated."""
        async with self._lock:
            standing = await self._in_thread(lambda: self._started().standing())
            try:
                publication = await self._publisher.publish(
                    self._trainer.weights, [RayReceiver(g) for g in generators], standing.version
                )
            except _ray_errors() as error:
                raise PublishError(f"a generator was lost while weights were published: {error}") from error
        for phase, seconds in publication.seconds_by_phase.items():
            metrics.PUBLISH_SECONDS.labels(phase).observe(seconds)
        return publication

    async def close(self) -> None:
        """Frees the trainer, and ends the other ranks."""
        async with self._lock:
            if self._learner is not None:
                await self._in_thread(self._trainer.close)
                self._learner = None

    def _started(self) -> Learner:
        if self._learner is None:
            from learner.device import resolve_device, resolve_dtype

            self._trainer = self._make_trainer()
            bf16 = self._engine_bf16
            if bf16 is None:
                bf16 = resolve_dtype(self._config.policy.dtype, resolve_device(self._config.device)) == "bf16"
            self._publisher = create_publisher(self._config.publish, run_id=self._run_id, bf16=bf16)
            learner = Learner(self._config, self._trainer, self._connect(), self._checkpoints)
            learner.start()
            self._learner = learner
        return self._learner

    def _make_trainer(self) -> Any:
        if self._config.stage == "frozen":
            from learner.frozen import FrozenTrainer

            return FrozenTrainer(self._config, seed=self._seed)
        from learner.ranks import LeadingTrainer, RankTrainer

        return LeadingTrainer(RankTrainer(self._config, world=self._world, address=self._address, seed=self._seed))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class RankProcess:
    """A further rank: follows the first one until it closes."""

    def __init__(self, config: LearnerConfig, rank: int, world: int, address: str, *, seed: int = 0) -> None:
        self._arguments: dict[str, Any] = {"rank": rank, "world": world, "address": address, "seed": seed}
        self._config = config

    def follow(self) -> None:
        """Returns when the first rank has closed."""
        from learner.ranks import RankTrainer

        RankTrainer(self._config, **self._arguments).follow()


class RayReceiver:
    """A generator actor as a publication's receiver."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def begin_update(self) -> None:
        """See Receiver."""
        await self._actor.begin_update.remote()

    async def load_weights(self, source: Any) -> None:
        """See Receiver."""
        await self._actor.load_weights.remote(source)

    async def finish_update(self, version: PolicyVersion) -> None:
        """See Receiver."""
        await self._actor.finish_update.remote(version)


def learner_actor() -> Any:
    """The Ray actor class; make one by `learner_actor().options(...).remote(config, run_id, checkpoints, connect)`."""
    import ray

    return ray.remote(LearnerProcess)


def rank_actor() -> Any:
    """The Ray actor class of further ranks."""
    import ray

    return ray.remote(RankProcess)


def _ray_errors() -> tuple[type[BaseException], ...]:
    try:
        from ray import exceptions
    except ImportError:
        return ()
    return (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.OwnerDiedError)


def free_address() -> str:
    """A `host:port` of this machine where ranks can meet."""
    import socket

    name = socket.gethostbyname(socket.gethostname())
    with socket.socket() as probe:
        probe.bind((name, 0))
        return f"{name}:{probe.getsockname()[1]}"
