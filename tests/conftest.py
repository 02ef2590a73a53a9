"""Fixtures that every package's tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

SHARED_VARIABLE = "KONTRAST_SHARED"


def pytest_configure() -> None:
    """Commands that a test starts can be interrupted, also where the tests run in the background of a shell, which
    ignores SIGINT there."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder of the red-team cases and data; skips visibly when the variable is unset, fails when it names nothing."""
    value = os.environ.get(SHARED_VARIABLE)
    if not value:
        pytest.skip(f"{SHARED_VARIABLE} is not set: red-team cases and benchmark data are not at hand")
    folder = Path(value)
    if not folder.is_dir():
        pytest.fail(f"{SHARED_VARIABLE}={value} is not a folder")
    return folder
