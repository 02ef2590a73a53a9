from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from learner.config import PublishConfig
from learner.errors import PublishError
from learner.publish import create_publisher
from learner.publish.files import FilesPublisher
from learner.publish.ipc_024 import IpcPublisher
from tasks.records import PolicyVersion

ONE = PolicyVersion(step=1)


class Engine:
    """A receiver that notes what happens to it, and can hang or fail in one of its calls."""

    def __init__(self, *, hangs_in: str = "", fails_in: str = "") -> None:
        self.calls: list[Any] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._hangs_in, self._fails_in = hangs_in, fails_in

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self._hangs_in:
            await asyncio.sleep(60)
        if name == self._fails_in:
            raise OSError("gone")

    async def begin_update(self) -> None:
        await self._call("begin")

    async def load_weights(self, source: Any) -> None:
        await self._call("load")
        for path in getattr(source, "paths", ()):
            self.tensors.update(load_file(path))

    async def finish_update(self, version: PolicyVersion) -> None:
        await self._call("finish")
        self.calls.append(str(version))


def weights(value: float = 1.0) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.full((2, 3), value)
        yield "b", torch.full((4,), value + 1)

    return tensors


def test_files_reach_every_engine_in_one_pause(tmp_path: Path) -> None:
    engines = [Engine(), Engine()]
    publisher = FilesPublisher([tmp_path / "new"], timeout_s=5, dtype=torch.bfloat16)
    done = asyncio.run(publisher.publish(weights(), engines, ONE))
    for engine in engines:
        assert engine.calls == ["begin", "load", "finish", "0.1"]
        assert torch.equal(engine.tensors["a"], torch.ones(2, 3, dtype=torch.bfloat16))
    assert (done.version, done.tensors, done.bytes, done.engines) == (ONE, 2, 20, 2)
    assert list(done.seconds_by_phase) == ["prepare", "pause", "transfer", "finalize", "resume"]


def test_one_file_is_left_and_close_removes_it(tmp_path: Path) -> None:
    publisher = FilesPublisher([tmp_path], timeout_s=5)
    for step in (1, 1, 2):
        asyncio.run(publisher.publish(weights(step), [Engine()], PolicyVersion(step=step)))
    assert [p.name for p in tmp_path.iterdir()] == ["policy-0.2.safetensors"]
    publisher.close()
    assert not tmp_path.exists()


def test_what_a_killed_learner_left_goes_once_the_next_version_is_taken(tmp_path: Path) -> None:
    """A whole file and a half one of an earlier process, in either folder; what is not ours stays."""
    folders = [tmp_path / "shm", tmp_path / "disk"]
    for folder in folders:
        folder.mkdir()
        for name in ("policy-0.7.safetensors", "policy-0.8.safetensors.partial", "notes"):
            (folder / name).touch()
    publisher = FilesPublisher(folders, timeout_s=5)
    with pytest.raises(OSError, match="gone"):
        asyncio.run(publisher.publish(weights(), [Engine(fails_in="load")], ONE))
    assert (folders[0] / "policy-0.7.safetensors").exists(), "kept until every engine has the next"
    asyncio.run(publisher.publish(weights(), [Engine()], ONE))
    left = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert left == [["notes", "policy-0.1.safetensors"], ["notes"]]
    publisher.close()
    assert [sorted(path.name for path in folder.iterdir()) for folder in folders] == [["notes"]] * 2


def test_files_are_written_before_the_pause(tmp_path: Path) -> None:
    engine = Engine()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        engine.calls.append("read")
        yield "a", torch.ones(1)

    asyncio.run(FilesPublisher([tmp_path], timeout_s=5).publish(tensors, [engine], ONE))
    assert engine.calls[:2] == ["read", "begin"]


@pytest.mark.parametrize(
    ("call", "phase", "cause"),
    [
        ("begin", "pause", "running step"),
        ("load", "transfer", "another device"),
        ("finish", "resume", "waits for a step"),
    ],
)
def test_the_watchdog_names_the_phase_and_the_probable_cause(tmp_path: Path, call: str, phase: str, cause: str) -> None:
    publisher = FilesPublisher([tmp_path], timeout_s=0.2)
    with pytest.raises(PublishError, match=f"phase {phase}.*{cause}"):
        asyncio.run(publisher.publish(weights(), [Engine(), Engine(hangs_in=call)], ONE))


def test_a_failed_publication_can_be_repeated(tmp_path: Path) -> None:
    publisher, healthy = FilesPublisher([tmp_path], timeout_s=5), Engine()
    with pytest.raises(OSError, match="gone"):
        asyncio.run(publisher.publish(weights(), [healthy, Engine(fails_in="load")], ONE))
    assert healthy.calls == ["begin", "load"], "no engine goes on with weights that another one lacks"
    asyncio.run(publisher.publish(weights(), [healthy, Engine()], ONE))
    assert healthy.calls[-1] == "0.1"


def test_a_full_disk_is_said_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", no_space)
    with pytest.raises(PublishError, match=r"No space left.*learner\.publish\.folder"):
        asyncio.run(FilesPublisher([tmp_path], timeout_s=5).publish(weights(), [Engine()], ONE))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_too_little_room_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten bytes are free where the first folder is: 40 bytes of weights go to the second."""
    places = [tmp_path / "small" / "kontrast-r", tmp_path / "large" / "kontrast-r"]
    for place in places:
        place.parent.mkdir()
    free = {places[0].parent: 10, places[1].parent: 10**9}
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free[path]}))
    asyncio.run(FilesPublisher(places, timeout_s=5).publish(weights(), [Engine()], ONE))
    assert [p.parent.parent.name for p in tmp_path.rglob("*.safetensors")] == ["large"]


def test_ipc_delivers_each_chunk_to_every_engine_between_pause_and_resume() -> None:
    """The transfer is rollout's; a stand-in sends a chunk per tensor and notes that each was taken before the next."""
    engines, taken = [Engine(), Engine()], []

    def send(tensors: Iterator[tuple[str, torch.Tensor]], deliver: Callable[[Any], None]) -> None:
        for name, _ in tensors:
            deliver(name)
            taken.append([len(engine.calls) for engine in engines])

    done = asyncio.run(IpcPublisher(timeout_s=5, send=send).publish(weights(), engines, ONE))
    assert taken == [[2, 2], [3, 3]]
    assert engines[0].calls == ["begin", "load", "load", "finish", "0.1"]
    assert (done.tensors, done.bytes) == (2, 40)


def test_the_configuration_chooses_the_adapter(tmp_path: Path) -> None:
    files = create_publisher(PublishConfig(folder=str(tmp_path)), run_id="r", bf16=True)
    assert isinstance(files, FilesPublisher)
    assert isinstance(create_publisher(PublishConfig(adapter="ipc_024"), run_id="r", bf16=True), IpcPublisher)
