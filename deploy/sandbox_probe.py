"""Which sandbox layers this machine allows: carries the worker's own isolation out in a child and reads what is on.

python -m deploy.sandbox_probe        # prints the layers that are on
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import NoReturn

from evaluator.worker import confine  # noqa: F401 - isolate() imports it where this folder may be hidden
from evaluator.worker.sandbox import LAYERS, SandboxPlan, enter_namespaces, isolate


def allowed_layers() -> list[str]:
    """Layers that are on in a child isolated like a candidate's worker; to be called single-threaded."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            os.close(reading)
            _probe(folder, writing)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
    return text.split()


def _probe(folder: str, writing: int) -> NoReturn:
    """Runs in the child: whatever happens ends it."""
    try:
        entered = enter_namespaces(LAYERS)
        inner = os.fork()  # the pid namespace begins with the next child
        if inner:
            os.waitpid(inner, 0)
        else:
            layers = isolate(SandboxPlan(fallback_scratch=folder), entered, {writing})
            os.write(writing, " ".join(layers).encode())
    finally:
        os._exit(0)


def main() -> None:
    """Prints the layers."""
    sys.stdout.write(", ".join(allowed_layers()) + "\n")


if __name__ == "__main__":
    main()
