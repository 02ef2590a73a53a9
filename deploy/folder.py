"""The folder of a run, `runs/<id>/`: everything needed to see, repeat or resume it.

Layout: `config.toml` as resolved, `environment.json`, `events.jsonl`, `kernels/<task>/<sample>.py` (accepted ones),
`checkpoints/`, `store/` (an embedded server's data), `summary.json`, and `logs/` once the run's processes have ended. A
run of several stages has a folder for each inside, with these files of its own and one store for all. Invariant: a file
is either absent or complete; only `events.jsonl` and loss curves grow.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import UsageError


def new_run_id(name: str, now_s: float | None = None) -> str:
    """`<UTC date and time>-<name>-<4 hex digits>`: sorts by time, and two starts in one second differ."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
    return f"{stamp}-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-') or 'run'}-{secrets.token_hex(2)}"


def find_run(folder: Path, name: str) -> Path:
    """The folder of a run by id, by unique beginning of the id, or by path; raises UsageError."""
    if (Path(name) / "config.toml").is_file():
        return Path(name)
    found = [entry.parent for entry in folder.glob("*/config.toml") if entry.parent.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(sorted(entry.parent.name for entry in folder.glob("*/config.toml"))[-5:]) or "none"
    several = f"{len(found)} runs begin with" if found else "There is no run"
    raise UsageError(f"{several} {name} in {folder}: the latest there are {known}.")


@dataclass(frozen=True)
class RunFolder:
    """Paths and writers of one run, or of a stage of it."""

    path: Path
    whole: RunFolder | None = None
    """The run that this stage belongs to."""

    @property
    def run_id(self) -> str:
        """The run's id is the folder's name; a stage's has the stage's name behind it."""
        return self.path.name if self.whole is None else f"{self.whole.run_id}-{self.path.name}"

    def stage(self, name: str) -> RunFolder:
        """The folder of a stage."""
        return RunFolder(self.path / name, self)

    def resolved(self) -> RunFolder:
        """The same by absolute paths, for other processes."""
        return RunFolder(self.path.resolve(), None if self.whole is None else self.whole.resolved())

    @property
    def checkpoints(self) -> Path:
        """Where the learner writes."""
        return self.path / "checkpoints"

    @property
    def store(self) -> Path:
        """Data of the embedded store, one for all stages."""
        return self.path / "store" if self.whole is None else self.whole.store

    @property
    def logs(self) -> Path:
        """Logs of the run's processes on this machine; absent where they wrote none."""
        return self.path / "logs"

    @property
    def events(self) -> Path:
        """Copy of the event stream, one JSON object per line."""
        return self.path / "events.jsonl"

    def create(self) -> RunFolder:
        """Makes the folder; raises UsageError when that is not possible."""
        try:
            for folder in (self.path, self.checkpoints, self.store, self.path / "kernels"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"Cannot make the run folder {self.path} ({error.strerror}): set run.folder.") from error
        return self

    def write_text(self, name: str, text: str) -> Path:
        """Writes a file in one step: a reader sees the old or the new one, never half of it."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.write_text(text)
        partial.replace(target)
        return target

    def write_json(self, name: str, value: Mapping[str, Any]) -> Path:
        """Writes indented JSON."""
        return self.write_text(name, json.dumps(value, indent=2, sort_keys=True) + "\n")


def kernel_file(task_id: str, sample_id: str) -> str:
    """Where an accepted kernel lies, relative to the run folder."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", task_id).strip("-.")
    return f"kernels/{safe}/{re.sub(r'[^A-Za-z0-9_.-]+', '-', sample_id)}.py"
