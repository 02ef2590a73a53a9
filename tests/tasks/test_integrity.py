"""Strays and stale copies on the import path are found and named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.integrity import IntegrityError, check_integrity, check_one_root, project_root, source_hash

CHECK = "from tasks.integrity import check_integrity; print(check_integrity())"


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(entry) for entry in path)}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )


def copy_of_kontrast(folder: Path) -> Path:
    for name in ("tasks", "exemplar_store", "evaluator", "rollout", "learner", "deploy"):
        shutil.copytree(project_root() / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_this_checkout_is_whole() -> None:
    assert check_one_root() == project_root()
    assert len(check_integrity(path=[])) == 64


@pytest.mark.parametrize("stray", ["rollout.py", "learner/__init__.py", "deploy/__init__.py"])
def test_a_stray_module_before_ours_is_named(tmp_path: Path, stray: str) -> None:
    """The stray shadows one package; `tasks` itself is ours, so that the check runs at all."""
    file = tmp_path / stray
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {CHECK}"
    done = run(f"import tasks; {code}", project_root())
    assert done.returncode != 0
    assert str(file) in done.stderr
    assert str(project_root()) in done.stderr


def test_a_stale_copy_is_named_and_an_equal_copy_is_not(tmp_path: Path) -> None:
    copy = copy_of_kontrast(tmp_path)
    assert run(CHECK, project_root(), copy).returncode == 0
    (copy / "tasks" / "version.py").write_text("PACKAGE_VERSION = '0.0.9'\n")
    done = run(CHECK, project_root(), copy)
    assert done.returncode != 0
    assert f"two different copies of kontrast on the import path, {project_root()} and {copy}" in done.stderr


def test_another_node_with_other_source_is_refused() -> None:
    with pytest.raises(IntegrityError, match="install the same version on every node"):
        check_integrity("0" * 64, path=[])


def test_the_hash_covers_names_and_content(tmp_path: Path) -> None:
    hashes = set()
    for index, (name, text) in enumerate([("a.py", "x"), ("b.py", "x"), ("a.py", "y"), ("a.lua", "x")]):
        folder = tmp_path / str(index)
        (folder / "tasks").mkdir(parents=True)
        (folder / "tasks" / name).write_text(text)
        hashes.add(source_hash(folder))
    assert len(hashes) == 4
