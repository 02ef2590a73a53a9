"""Under `ray job submit` on a cluster that asks for a token: the job joins the cluster, its output comes back, and a
working folder with names of ours ends in a sentence."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.integrity import project_root

pytestmark = [pytest.mark.heavy, pytest.mark.slow]
RAY = Path(sys.executable).with_name("ray")


class Head:
    """A Ray head with dashboard, token auth and a session folder of its own."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.gcs, self.dashboard = free_port(), free_port()
        self.environment = {
            **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(project_root()),
        }  # fmt: skip
        self.environment.pop("RAY_ADDRESS", None)
        done = self.ray(
            "start", "--head", "--num-cpus", "2", "--port", str(self.gcs), "--dashboard-host", "127.0.0.1",
            "--dashboard-port", str(self.dashboard), "--dashboard-agent-listen-port", str(free_port()),
            "--temp-dir", folder, "--disable-usage-stats",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def ray(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(RAY), *arguments], env=self.environment, capture_output=True, text=True, timeout=240)

    def submit(self, working_dir: Path, *command: str) -> subprocess.CompletedProcess[str]:
        return self.ray(
            "job", "submit", "--address", f"http://127.0.0.1:{self.dashboard}", "--working-dir", str(working_dir),
            "--", *command,
        )  # fmt: skip

    def stop(self) -> None:
        """Ends the processes whose command line names this session's folder, and no others."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                try:
                    command = (entry / "cmdline").read_bytes().decode(errors="replace")
                except OSError:
                    continue
                if self.folder in command:
                    os.kill(int(entry.name), signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with tempfile.TemporaryDirectory(prefix="kr", dir="/tmp", ignore_cleanup_errors=True) as folder:
        started = Head(folder)
        yield started
        started.stop()


ENTRY = (sys.executable, "-P", "-m", "kontrast_entry")


def test_a_submitted_job_joins_the_cluster_and_its_output_comes_back(head: Head, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "demo"\n[run]\nname = "submitted"\n')
    done = head.submit(tmp_path, *ENTRY, "train", "mine.toml", "--dry-run")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert 'name = "submitted"' in output
    assert "generator" in output
    assert "this machine" not in output, "the plan was made against the cluster, not against this machine"


def test_a_working_folder_with_a_stranger_ends_in_a_sentence(head: Head, tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "__init__.py").write_text("")
    (tmp_path / "tasks.py").write_text("")
    done = head.submit(tmp_path, *ENTRY, "train", "demo", "--dry-run")
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "package tasks would be imported from" in output
    assert str(project_root()) in output


def test_without_the_token_the_refusal_is_a_sentence(head: Head, tmp_path: Path) -> None:
    environment = {**head.environment, "RAY_ADDRESS": f"127.0.0.1:{head.gcs}", "RAY_AUTH_TOKEN": "0" * 64}
    done = subprocess.run(
        [*ENTRY, "train", "demo", "--dry-run"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "RAY_AUTH" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_clone_would_upload_is_small() -> None:
    """Ray packs what neither ignore file names; the limit is 5 MB."""
    from ray._private.runtime_env import packaging

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "upload.zip"
        packaging.create_package(str(project_root()), target, include_gitignore=True)
        with zipfile.ZipFile(target) as package:
            names = package.namelist()
        assert "pyproject.toml" in names
        assert not [name for name in names if name.startswith((".git/", "tests/"))]
        assert target.stat().st_size < 5_000_000
