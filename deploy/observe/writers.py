"""Figures of each step to TensorBoard and Weights & Biases, beside the run's own JSON lines.

Both are optional packages. Invariants: what a run is decides from its own files alone, never from these; a missing
package ends the command in one sentence before anything starts; W&B writes to the run's folder unless the
configuration says `online`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from deploy.config import ObserveConfig
from tasks.errors import UsageError

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""Setting of `observe` -> package that it needs."""


class Writer(Protocol):
    """Takes the figures of one step after the other."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Adds a step's figures."""

    def restart(self, step: int) -> None:
        """What was written after this step is void: the run has gone back to it."""

    def close(self) -> None:
        """Writes what is left."""


class Writers:
    """All writers that the configuration asks for, as one; a context manager."""

    def __init__(self, writers: list[Writer]) -> None:
        self._writers = writers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers:
            writer.close()

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Adds a step's figures; what is no finite number is left out."""
        finite = {
            name: float(value) for name, value in figures.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }  # fmt: skip
        for writer in self._writers:
            writer.write(step, finite)

    def restart(self, step: int) -> None:
        """See Writer."""
        for writer in self._writers:
            writer.restart(step)


def check_writers(config: ObserveConfig) -> None:
    """Raises UsageError when a package is missing."""
    asked = {"tensorboard": config.tensorboard, "wandb": config.wandb != "off"}
    for setting, package in PACKAGES.items():
        if asked[setting] and importlib.util.find_spec(package) is None:
            off = "false" if setting == "tensorboard" else "off"
            raise UsageError(
                f"observe.{setting} needs the package {package}, which is not installed: run `pip install {package}`, "
                f"or set observe.{setting} to {off}."
            )


def open_writers(config: ObserveConfig, folder: Path, name: str, settings: Mapping[str, Any]) -> Writers:
    """The writers of one run or stage; `settings` go with it. Raises UsageError when a package is missing."""
    check_writers(config)
    writers: list[Writer] = []
    if config.tensorboard:
        writers.append(TensorboardWriter(folder / "tensorboard"))
    if config.wandb != "off":
        writers.append(WandbWriter(folder, name, config.wandb, config.wandb_project, settings))
    return Writers(writers)


class TensorboardWriter:
    """An event file in the run's folder; read it by `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open: Callable[..., Any] = SummaryWriter
        self._folder = str(folder)
        self._writer = self._open(self._folder)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """See Writer."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def restart(self, step: int) -> None:
        """See Writer: TensorBoard hides the steps that a new file purges."""
        self._writer.close()
        self._writer = self._open(self._folder, purge_step=step + 1)

    def close(self) -> None:
        """See Writer."""
        self._writer.close()


class WandbWriter:
    """A W&B run in the run's folder; `wandb sync` sends an offline one later."""

    def __init__(self, folder: Path, name: str, mode: str, project: str, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=project, name=name, id=name, dir=str(folder), mode=mode, resume="allow", config=dict(settings),
            settings=wandb.Settings(silent=True),
        )  # fmt: skip
        # A step of one's own, since a run that goes back repeats steps, which W&B's counter refuses.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """See Writer."""
        self._run.log({"step": step, **figures})

    def restart(self, step: int) -> None:
        """See Writer: repeated steps stand beside the earlier ones."""

    def close(self) -> None:
        """See Writer."""
        self._run.finish()
