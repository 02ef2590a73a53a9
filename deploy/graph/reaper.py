"""Ends what a local Ray leaves behind when the command that started it dies.

Ray's own processes watch their parent at their leisure: after a SIGKILL some live on for a minute and more. Everything
the command starts inherits a mark in its environment; a process beside the command, which the kernel tells of the
command's end however it came (tasks.lifeline), then ends every process that carries the mark, and removes what they
kept in memory.

    python -m deploy.graph.reaper MARK [FOLDER ...]     # what `reaping` runs
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tasks.integrity import project_root
from tasks.lifeline import GRACE_S, spawn

MARK = "KONTRAST_COMMAND_MARK"
SWEEP_S = 0.8 * GRACE_S
"""How long is swept at most: the supervisor ends the reaper itself after its grace."""
PAUSE_S = 0.05
CLEAN_SWEEPS = 3
"""So many sweeps in a row must find nothing: a process that was just forked may not show its environment yet."""


@contextmanager
def reaping(environment: MutableMapping[str, str], folders: Sequence[Path] = ()) -> Iterator[None]:
    """Marks what is started inside, and sees that none of it outlives this block or this process, nor do `folders`."""
    mark = secrets.token_hex(16)
    unmarked = {name: value for name, value in environment.items() if name != MARK}
    unmarked["PYTHONPATH"] = os.pathsep.join(filter(None, (str(project_root()), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "deploy.graph.reaper", mark, *(str(folder.resolve()) for folder in folders)]
    reaper = spawn(command, env=unmarked, stdout=subprocess.PIPE)
    output = reaper.process.stdout
    assert output is not None
    with output:
        output.readline()  # it is up, or has ended: without it the block still runs
    before = environment.get(MARK)
    environment[MARK] = mark
    try:
        yield
    finally:
        if before is None:
            environment.pop(MARK, None)
        else:
            environment[MARK] = before
        reaper.stop()


def marked(mark: str) -> list[int]:
    """The running processes of this user that were started with the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def sweep(mark: str) -> None:
    """Kills every marked process until none appears any more, or the time is over."""
    deadline = time.monotonic() + SWEEP_S
    clean = 0
    while clean < CLEAN_SWEEPS and time.monotonic() < deadline:
        found = marked(mark)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        clean = 0 if found else clean + 1
        time.sleep(PAUSE_S)


def main(mark: str, folders: Sequence[str]) -> None:
    """Sleeps until SIGTERM, which comes when the lifeline closes, and sweeps."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.write(1, b"up\n")
    signal.sigwait({signal.SIGTERM})
    sweep(mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
