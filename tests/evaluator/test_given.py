"""The public functions take records, paths, ids and text, and refuse anything else in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evaluator import Evaluator
from evaluator.given import candidate_of, task_of
from tasks.errors import UsageError
from tasks.records import Candidate, Task

KERNEL = "import torch\n\n\nclass ModelNew(torch.nn.Module):\n    pass\n"


def test_a_task_may_be_a_record_a_path_an_id_or_text(tmp_path: Path, task: Task) -> None:
    path = tmp_path / "relu_linear.py"
    path.write_text(task.source)
    for given in (task, path, str(path), task.source):
        assert task_of(given, "cpu").content_hash == task.content_hash
    assert task_of("procedural:row_norm/17", "cpu").id == "procedural:row_norm/17"
    sizes = {task_of("procedural:row_norm/17", device).source for device in ("cpu", "H200")}
    assert len(sizes) == 2, "a procedural task has the size of its device"


def test_a_candidate_may_be_a_record_a_path_or_text(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    for given in (Candidate(source=KERNEL), path, str(path), KERNEL):
        assert candidate_of(given).source == KERNEL


@pytest.mark.parametrize("given", [None, 3, b"kernel.py", ["kernel.py"], Candidate, object()])
def test_anything_else_is_refused_in_one_sentence(given: Any) -> None:
    for take, noun in ((lambda: task_of(given, "cpu"), "task"), (lambda: candidate_of(given), "candidate")):
        with pytest.raises(UsageError, match=f"the {noun} is .*: give a path") as raised:
            take()
        assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("given", ["absent.py", Path("absent.py"), "", "/"])
def test_a_path_to_no_file_is_refused_in_one_sentence(given: str | Path) -> None:
    for take in (lambda: task_of(given, "cpu"), lambda: candidate_of(given)):
        with pytest.raises(UsageError) as raised:
            take()
        assert len(str(raised.value).splitlines()) == 1


def test_the_evaluator_itself_reads_paths(evaluator: Evaluator, task: Task, tmp_path: Path) -> None:
    for name, text in (("task.py", task.source), ("kernel.py", KERNEL)):
        (tmp_path / name).write_text(text)
    found = evaluator.evaluate(str(tmp_path / "task.py"), tmp_path / "kernel.py")
    assert (found.outcome, found.reason) == ("rejected", "crash")
    assert found.task_hash == task.content_hash
