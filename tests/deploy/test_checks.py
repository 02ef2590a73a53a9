"""`kontrast doctor`: each check answers in words, and a failing environment is found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploy import checks
from deploy.checks import Check, run_checks


def by_name(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


def test_this_machine_passes_the_fast_checks() -> None:
    found = by_name(list(run_checks(fast=True)))
    assert {name for name, check in found.items() if check.status == "fail"} == set()
    assert all(check.message for check in found.values())
    assert "seccomp" in found["sandbox"].message


def test_missing_tools_are_named_with_both_package_managers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    check = checks._compiler()
    assert check.status == "fail"
    assert "g++ and make not found: apt install g++ make (Debian) or dnf install gcc-c++ make (Fedora)" in check.message


def test_a_mismatched_torchvision_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchvision that torch cannot load raises on import; the check says what to remove."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    check = checks._torchvision()
    assert check.status == "fail"
    assert "torchvision::nms does not exist" in check.message
    assert "pip uninstall torchvision" in check.message


def test_a_missing_module_is_a_warning_or_failure_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_import", lambda code: (False, "ModuleNotFoundError: No module named 'vllm'"))
    assert checks._vllm().status == "warn"
    assert "transformers engine is used" in checks._vllm().message
    assert checks._torch().status == "fail"
    assert "requirements/cpu.txt" in checks._torch().message
    assert checks._sandbox().status == "fail"
