"""vLLM 0.24's transfer against a fake that keeps its rules; the real one needs a GPU (marker gpu)."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.engines.base import DeviceTransfer
from rollout.engines.weights_024 import TransferReceiver, check_version, engine_arguments
from tasks.errors import UsageError


class FakeLLM:
    """start, any number of updates, finish; anything else raises, as vLLM does."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.open = False

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.calls.append(("init", request))

    def start_weight_update(self, is_checkpoint_format: bool) -> None:
        assert not self.open
        self.open = True
        self.calls.append(("start", is_checkpoint_format))

    def update_weights(self, request: dict[str, Any]) -> None:
        assert self.open
        self.calls.append(("update", request))

    def finish_weight_update(self) -> None:
        assert self.open
        self.open = False
        self.calls.append(("finish",))


def test_the_order_of_calls() -> None:
    llm = FakeLLM()
    receiver = TransferReceiver(llm)
    receiver.begin()
    receiver.load(DeviceTransfer({"names": ["a"]}))
    receiver.load(DeviceTransfer({"names": ["b"]}))
    receiver.finish()
    assert llm.calls == [
        ("init", {"init_info": {}}), ("start", True), ("update", {"update_info": {"names": ["a"]}}),
        ("update", {"update_info": {"names": ["b"]}}), ("finish",),
    ]  # fmt: skip
    assert engine_arguments() == {"weight_transfer_config": {"backend": "ipc"}}


@pytest.mark.parametrize("version", ["0.20.1", "0.25.0", "0.32.0", "1.0.0"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(UsageError, match=version):
        check_version(version)


@pytest.mark.parametrize("version", ["0.21.0", "0.24.0", "0.24.1.dev3+cpu"])
def test_its_own_versions_are_taken(version: str) -> None:
    check_version(version)
