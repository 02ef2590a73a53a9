"""The console script's first step: are the packages that Python would import the ones installed beside this file?

Standard library only, and under a name of its own: a working directory that holds a `tasks.py` or a `deploy/` of
somebody else's (PYTHONPATH has it first under `ray job submit --working-dir`) must end in a sentence, not in an
ImportError halfway through.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGES = ("tasks", "exemplar_store", "evaluator", "rollout", "learner", "deploy")


def strangers() -> list[tuple[str, Path, Path]]:
    """(name, where it would come from, where it should) of every package that is shadowed or missing."""
    root = Path(__file__).resolve().parent
    found = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else Path()
        if origin != root / name / "__init__.py":
            found.append((name, origin, root / name))
    return found


def main() -> None:
    """Entry point of `kontrast`."""
    for name, origin, expected in strangers():
        where = f"would be imported from {origin}" if origin != Path() else "is missing"
        sys.stderr.write(
            f"kontrast: package {name} {where}, but kontrast runs from {expected}: rename or remove the first, "
            f"run kontrast from another folder, or reinstall it.\n"
        )
        sys.exit(2)
    from deploy.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
