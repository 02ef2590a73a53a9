"""What the zygote imports before it forks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from evaluator.worker import zygote

MODULE = """
import os
seen = os.environ.get("CUDA_VISIBLE_DEVICES")
if {fails}:
    raise ImportError("broken")
"""


@pytest.mark.parametrize("before", [None, "GPU-1234"])
@pytest.mark.parametrize("fails", [False, True])
def test_devices_are_hidden_from_the_extension_builder_and_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, fails: bool
) -> None:
    """A module in the builder's place notes what it is shown; the count that it cached is forgotten."""
    (tmp_path / "fake_builder.py").write_text(MODULE.format(fails=fails))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fake_builder", raising=False)
    monkeypatch.setattr(zygote, "EXTENSIONS", "fake_builder")
    monkeypatch.setattr(torch.cuda, "_cached_device_count", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    if fails:
        with pytest.raises(ImportError):
            zygote._import_extensions()
    else:
        zygote._import_extensions()
        assert sys.modules.pop("fake_builder").seen == ""
    assert torch.cuda._cached_device_count is None
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
