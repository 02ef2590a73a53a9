"""The interface of every engine, and what passes through it.

Invariants: each requested sample leaves exactly once, as a Completion or inside the exception that ends its `generate`;
`token_ids`, `logprobs` and the versions belong to the same tokens; weights change only between `begin_update` and
`finish_update`, and no token is drawn between these two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import KontrastError
from tasks.records.group import FinishReason, PolicyVersion, Prompt


class EngineDied(KontrastError):
    """The engine cannot go on: its step failed, or none has finished for too long. Start a new one."""


class WeightsError(KontrastError):
    """Weights do not fit the engine's model; the engine's weights are undefined until the next complete load."""


@dataclass(frozen=True)
class GenerationRequest:
    """Samples to draw from one prompt: one for each of `indices`, which become the samples' indices."""

    prompt: Prompt
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Usage:
    """Tokens of one draw as an endpoint counts them, for its bill."""

    prompt_tokens: int = 0
    new_tokens: int = 0


@dataclass(frozen=True)
class Completion:
    """One finished draw.

    `logprobs` are those of the sampler after temperature (processed, nats), one for each of `token_ids`; the end
    token is among them where it was drawn. `policy_versions` has one entry when all tokens have one version, else one
    per token. Engines that only relay text leave the three empty.
    """

    prompt_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[PolicyVersion, ...]
    finish_reason: FinishReason
    usage: Usage | None = None
    """What an endpoint counted; None where the tokens are here to be counted, or where it says nothing."""


@dataclass(frozen=True)
class SafetensorsFiles:
    """All weights of the policy, full and merged, under Hugging Face names, in files that the engine can read."""

    paths: tuple[Path, ...]


@dataclass(frozen=True)
class DeviceTransfer:
    """One chunk of weights in device memory, as vLLM 0.24's transfer describes it (see `weights_024`)."""

    update_info: dict[str, Any]


WeightSource = SafetensorsFiles | DeviceTransfer


class Engine(ABC):
    """Draws samples from the policy."""

    name: str

    @property
    @abstractmethod
    def policy_version(self) -> PolicyVersion:
        """Version that the next token will be drawn under."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        """Yields each completion as it finishes, in no fixed order.

        Closing the iterator early cancels what has not finished. Raises EngineDied.
        """

    @abstractmethod
    async def begin_update(self) -> None:
        """Waits for the running step and stops before the next; samples in flight stay where they are.

        A sleeping engine is woken: its weights must be in place to be replaced.
        """

    @abstractmethod
    async def load_weights(self, source: WeightSource) -> None:
        """Loads all weights, or one chunk of them; only between `begin_update` and `finish_update`.

        Raises WeightsError when they do not fit, and UsageError when the engine takes none or none of this kind.
        """

    @abstractmethod
    async def finish_update(self, version: PolicyVersion) -> None:
        """Makes the loaded weights the policy's, forgets cached prefixes, and goes on under `version`."""

    @abstractmethod
    async def sleep(self) -> None:
        """Waits for the samples in flight, then keeps the device idle, and free where the engine can, until `wake`."""

    @abstractmethod
    async def wake(self) -> None:
        """Makes the engine ready again after `sleep`."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the engine; samples in flight end with EngineDied. Safe to call twice."""
