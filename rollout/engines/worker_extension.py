"""What Kontrast adds to a vLLM worker: taking the policy's weights from safetensors files.

vLLM imports this module in its worker and mixes the class into it, so nothing here may need the rest of Kontrast. Only
file names cross to the worker, never pickled tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class KontrastWorker:
    """Mixed into vLLM's worker class; `model_runner` is that class's."""

    model_runner: Any

    def load_safetensors(self, paths: Sequence[str]) -> None:
        """Replaces all weights in place.

        `reload_weights` also repeats what the backend did to the weights after loading: the CPU backend packs linear
        weights and empties the originals, so the model's own loader cannot be used a second time.
        """
        self.model_runner.reload_weights(weights_iterator=_tensors(paths))


def _tensors(paths: Sequence[str]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                yield name, file.get_tensor(name)
