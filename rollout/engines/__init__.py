"""Engines behind one interface: vLLM, transformers, and any OpenAI-compatible endpoint.

Importing this package imports none of them; `create_engine` imports the one it makes.
"""

from __future__ import annotations

from rollout.engines.base import (
    Completion,
    DeviceTransfer,
    Engine,
    EngineDied,
    GenerationRequest,
    SafetensorsFiles,
    WeightsError,
)
from rollout.engines.create import create_engine

__all__ = [
    "Completion", "DeviceTransfer", "Engine", "EngineDied", "GenerationRequest", "SafetensorsFiles", "WeightsError",
    "create_engine",
]  # fmt: skip
