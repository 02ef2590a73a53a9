"""The logs of a run's processes, collected from Ray's session folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.folder import RunFolder
from deploy.graph import logs


def _session(folder: Path, **texts: bytes) -> Path:
    (folder / "logs").mkdir(parents=True)
    for name, text in texts.items():
        (folder / "logs" / name.replace("__", ".").replace("_", "-")).write_bytes(text)
    return folder


def test_a_log_is_named_by_its_actor_and_holds_what_the_actor_wrote(tmp_path: Path) -> None:
    head = b":job_id:01000000\n:actor_name:LearnerActor\n"
    session = _session(
        tmp_path / "session", worker_ab_01000000_7__err=head + b"first\nsecond\n", worker_ab_01000000_7__out=head,
        worker_cd_01000000_8__out=b"no actor\n", worker_ef_02000000_9__err=b"another job\n", raylet__err=b"noise\n",
    )  # fmt: skip
    found = logs.collect_logs(session, "01000000", tmp_path / "run" / "logs")
    assert {path.name: path.read_text() for path in found} == {
        "LearnerActor-7.err": "first\nsecond\n", "worker-8.out": "no actor\n",
    }  # fmt: skip
    assert set(found) == set((tmp_path / "run" / "logs").iterdir())


def test_without_a_word_there_is_no_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run").create()
    session = _session(tmp_path / "session", worker_ab_01000000_7__err=b":job_id:01000000\n\n")
    assert logs.collect_logs(session, "01000000", run.logs) == []
    assert logs.collect_logs(tmp_path / "gone", "01000000", run.logs) == []
    assert not run.logs.exists()


def test_of_a_long_log_the_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b":actor_name:Evaluator\n" + b"x" * 100 + b"\nlast\n"
    session = _session(tmp_path / "session", worker_ab_01000000_7__err=text)
    monkeypatch.setattr(logs, "MAX_BYTES", 10)
    (found,) = logs.collect_logs(session, "01000000", tmp_path / "logs")
    assert found.name == "Evaluator-7.err"
    assert found.read_text() == "xxxx\nlast\n"
