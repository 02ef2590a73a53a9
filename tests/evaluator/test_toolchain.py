"""Compilers that are scripts, and processes that find installed packages where this one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evaluator.compile import toolchain
from evaluator.worker.process import ROOT
from evaluator.worker.sandbox import holds_private, import_path, interpreter_trees


def program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_a_driver_that_is_a_script_brings_its_interpreter_and_what_lies_beside_it(tmp_path: Path) -> None:
    driver = program(tmp_path / "bin" / "gcc", '#!/bin/sh\nexec "$0-real" "$@"\n')
    real = program(tmp_path / "bin" / "gcc-real", "\x7fELF")
    program(tmp_path / "bin" / "other", "\x7fELF")
    (tmp_path / "bin" / "gcc.txt").write_text("no program")
    assert toolchain._script_parts(driver) == {driver, real, os.path.realpath("/bin/sh")}
    assert toolchain._script_parts(real) == set()
    assert {driver, real, os.path.realpath("/bin/sh")} <= set(toolchain._host_programs((driver,)))


def test_an_interpreter_named_through_env_is_found(tmp_path: Path) -> None:
    driver = program(tmp_path / "cc", "#!/usr/bin/env sh\n")
    wanted = {driver, *(os.path.realpath(path) for path in ("/usr/bin/env", "/bin/sh"))}
    assert toolchain._script_parts(driver) == wanted


def test_a_compiler_outside_the_system_reads_its_own_tree_but_no_home(tmp_path: Path) -> None:
    inside = (str(tmp_path / "gcc" / "bin" / "gcc"), "/usr/bin/gcc", str(Path.home() / "bin" / "gcc"))
    assert toolchain._prefixes(inside) == (str(tmp_path / "gcc"),)


def test_packages_are_inherited_and_a_scripts_folder_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site" / "somewhere-1.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "somewhere.py").write_text("here = 1\n")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "named").mkdir()
    (tmp_path / "site" / "tools" / "_vendor" / "older-1.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "tools" / "__init__.py").touch()
    for name in ("site", "scripts", "site/tools/_vendor"):
        monkeypatch.syspath_prepend(str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "named"))
    entries = import_path().split(os.pathsep)  # a library that an earlier test imported may have added its own
    assert entries[:3] == [str(ROOT), str(tmp_path / "named"), str(tmp_path / "site")]
    assert not {str(tmp_path / "scripts"), str(tmp_path / "site" / "tools" / "_vendor")} & set(entries)
    code = "import somewhere, pydantic, evaluator.compile.server"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": import_path()}, cwd="/", check=True)


def test_no_entry_of_the_import_path_opens_the_project_or_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in ("/", str(ROOT), str(ROOT.parent), str(Path.home())):
        assert holds_private(entry)
        monkeypatch.setattr(sys, "path", [entry])
        assert os.path.realpath(entry) not in interpreter_trees()
