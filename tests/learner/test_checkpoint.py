from __future__ import annotations

from pathlib import Path

import pytest

from learner.checkpoint import MARKER, CheckpointFolder, LearnerState
from learner.errors import CheckpointError
from tasks.records import PolicyVersion


def state(step: int, epoch: int = 0) -> LearnerState:
    version = PolicyVersion(epoch=epoch, step=step)
    return LearnerState(run_id="r", version=version, starts={0: 0}, fates={f"g{step}": "trained"})


def save(folder: CheckpointFolder, step: int, epoch: int = 0) -> Path:
    made = state(step, epoch)
    (folder.begin(made.version) / "weights").write_text(f"{epoch}/{step}")
    return folder.complete(made).folder


def test_the_newest_complete_one_comes_back(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "new", keep=2)
    assert folder.latest() is None
    save(folder, 1)
    save(folder, 2)
    found = folder.latest()
    assert found is not None
    assert found.state == state(2)
    assert (found.folder / "weights").read_text() == "0/2"


def test_only_the_last_n_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (1, 2, 3, 11):
        save(folder, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003.e0", "step-00000011.e0"]


def test_a_half_written_one_is_never_read_and_goes_at_the_next_start(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    save(folder, 1)
    (folder.begin(PolicyVersion(step=2)) / "weights").write_text("half")
    found = folder.latest()
    assert found is not None
    assert found.state.version.step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.e0"]


def test_a_folder_without_its_marker_does_not_count(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    save(folder, 1)
    (save(folder, 2) / MARKER).unlink()
    found = folder.latest()
    assert found is not None
    assert found.state.version.step == 1


def test_the_surviving_lineage_wins_over_a_higher_step_of_a_lost_one(tmp_path: Path) -> None:
    """Epoch 1 resumed at step 3 after the folder of epoch 0's step 5 was damaged, and wrote step 4."""
    folder = CheckpointFolder(tmp_path, keep=3)
    save(folder, 5, epoch=0)
    save(folder, 4, epoch=1)
    found = folder.latest()
    assert found is not None
    assert found.state.version == PolicyVersion(epoch=1, step=4)


def test_writing_a_version_again_replaces_it(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    save(folder, 1)
    assert (save(folder, 1) / "weights").read_text() == "0/1"


def test_what_cannot_be_written_or_read_is_said_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="no checkpoint can be written in"):
        CheckpointFolder(tmp_path / "file" / "folder", keep=1).begin(PolicyVersion())
    folder = CheckpointFolder(tmp_path / "good", keep=2)
    (save(folder, 1) / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="remove that folder"):
        folder.latest()
