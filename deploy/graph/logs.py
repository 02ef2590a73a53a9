"""Brings the logs of a run's processes into its folder, from where Ray writes them on this machine.

Invariants: only what this process's job wrote; the folder exists only when something is in it; a log that cannot be
read costs the run nothing.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

_log = logging.getLogger(__name__)
MAX_BYTES = 8 << 20
"""Longest log that is kept; of a longer one its end."""
_OWN_LINES = (b":job_id:", b":actor_name:", b":task_name:")


def collect_logs(session: Path, job_id: str, target: Path) -> list[Path]:
    """Copies standard output and error of the job's workers, `LearnerActor-7023.err`; returns the new files.

    `session` is Ray's session folder on this machine. Workers that wrote nothing have no file.
    """
    found = []
    for log in sorted((session / "logs").glob(f"worker-*-{job_id}-*")):
        with contextlib.suppress(OSError):
            name, text = _read(log)
            if text.strip():
                target.mkdir(parents=True, exist_ok=True)
                pid = log.stem.rpartition("-")[2]
                copy = target / f"{name}-{pid}{log.suffix}"
                copy.write_bytes(text)
                found.append(copy)
    return found


def _read(log: Path) -> tuple[str, bytes]:
    """The actor's class and what it wrote, Ray's own lines left out."""
    with log.open("rb") as file:
        head = file.read(1 << 12).splitlines()
        begin = max(0, log.stat().st_size - MAX_BYTES)
        file.seek(begin)
        lines = file.read(MAX_BYTES).splitlines(keepends=True)
    names = [line.removeprefix(b":actor_name:").decode() for line in head if line.startswith(b":actor_name:")]
    text = b"".join(line for line in lines if not line.startswith(_OWN_LINES))
    return names[0] if names else "worker", text
