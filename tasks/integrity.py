"""All six packages come from one root with one source hash, or the process says which two paths disagree.

The packages have everyday names, so a stray `tasks.py` in a working directory or a stale installed copy could take the
place of one of them. Invariant: what this module needs is the standard library and `tasks.errors` only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from tasks.errors import UsageError

PACKAGES = ("tasks", "exemplar_store", "evaluator", "rollout", "learner", "deploy")
SOURCE_SUFFIXES = (".py", ".md", ".toml", ".lua", ".json", ".jsonl", ".c")
MARKER = Path("tasks") / "integrity.py"
"""A folder with this file is a copy of Kontrast."""


class IntegrityError(UsageError):
    """Two copies of Kontrast, or a stranger's module under one of its names, on one import path."""


def project_root() -> Path:
    """The folder that holds the six packages of this process."""
    return Path(__file__).resolve().parents[1]


def check_one_root(packages: Sequence[str] = PACKAGES) -> Path:
    """Checks that every package would be imported from the same root; imports none of them.

    Returns the root. Raises IntegrityError that names both paths, or a package that is missing.
    """
    root = project_root()
    for name in packages:
        loaded = sys.modules.get(name)
        spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise IntegrityError(
                f"Package {name} is not at {root / name}: reinstall kontrast, or run it from a whole clone."
            )
        found = Path(spec.origin).resolve()
        if found != root / name / "__init__.py":
            raise IntegrityError(
                f"{name} would be imported from {found}, but kontrast runs from {root / name}: "
                f"rename or remove the first, or take its folder off the import path."
            )
    return root


def check_integrity(expected_hash: str = "", *, path: Iterable[str] | None = None) -> str:
    """The whole check: one root, no differing copy on the import path, and the hash that the driver runs with.

    `expected_hash` is the source hash of the process that started this one; empty at the start of a command. Returns
    this process's source hash. Raises IntegrityError.
    """
    root = check_one_root()
    mine = source_hash(root)
    for entry in sys.path if path is None else path:
        other = Path(entry or ".").resolve()
        if other != root and (other / MARKER).is_file() and source_hash(other) != mine:
            raise IntegrityError(
                f"There are two different copies of kontrast on the import path, {root} and {other}: "
                f"uninstall one (`pip uninstall kontrast`) or install the clone with `pip install -e .`."
            )
    if expected_hash and expected_hash != mine:
        raise IntegrityError(
            f"The kontrast at {root} on this node (source {mine[:12]}) is not the one that started the run "
            f"(source {expected_hash[:12]}): install the same version on every node."
        )
    return mine


@lru_cache(maxsize=8)
def source_hash(root: Path) -> str:
    """SHA-256 over relative path and content of every source and data file of the packages under `root`."""
    hasher = hashlib.sha256()
    for name in PACKAGES:
        for file in sorted((root / name).rglob("*")):
            if file.suffix in SOURCE_SUFFIXES and "__pycache__" not in file.parts and file.is_file():
                data = file.read_bytes()
                relative = file.relative_to(root).as_posix().encode()
                hasher.update(b"%d %d " % (len(relative), len(data)) + relative + data)
    return hasher.hexdigest()
