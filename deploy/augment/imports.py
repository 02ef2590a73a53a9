"""Existing sets of kernels, read to be evaluated anew: no number that comes with them counts.

| what a path is | its kernels |
|---|---|
| a file of JSON lines | CUDA-L1's release, or demonstrations of an earlier augmentation |
| a KernelBench run folder | `level_L_problem_P_sample_S_kernel.py` |
| a run of `kontrast augment` | its `demonstrations.jsonl` |
| any other folder | beside each `task.py` in it or below, the other `.py` files: kernels of that task |

Invariant: what cannot be used is counted with its reason, or refused with the line that is wrong.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from deploy.augment.augmenter import Imported
from deploy.augment.state import IMPORT
from exemplar_store.foreign import is_cuda_l1, is_kernelbench_run, read_cuda_l1, read_kernelbench_run
from tasks.errors import UsageError
from tasks.records import Candidate, Demonstration, Task
from tasks.reference_source import read_source, task_from_source

DEMONSTRATIONS = "demonstrations.jsonl"
"""The file of what an augmentation keeps."""
TASK_FILE = "task.py"


def read_set(path: Path, device_type: str, load_task: Callable[[str], Task], skipped: Counter[str]) -> list[Imported]:
    """The kernels of one set. Raises UsageError; `skipped` counts what holds no kernel."""
    if path.is_dir() and (path / DEMONSTRATIONS).is_file():
        path = path / DEMONSTRATIONS
    if path.is_file():
        return list(_lines(path, device_type, skipped))
    if not path.is_dir():
        raise UsageError(f"there is no {path}: name a file of JSON lines or a folder to import")
    if is_kernelbench_run(path):
        found = read_kernelbench_run(path, device_type, load_task, skipped)
        return [Imported(f"{IMPORT}{path.name}", task, _candidate(claim.source, claim.origin)) for task, claim in found]
    return list(_folders(path))


def _lines(path: Path, device_type: str, skipped: Counter[str]) -> Iterator[Imported]:
    name = f"{IMPORT}{path.parent.name if path.name == DEMONSTRATIONS else path.stem}"
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where} is not JSON ({error}): repair it, or take it out") from error
        if isinstance(value, dict) and is_cuda_l1(value):
            found = read_cuda_l1(value, device_type, skipped)
            if found is not None:
                yield Imported(name, found[0], _candidate(found[1].source, found[1].origin))
            continue
        try:
            demonstration = Demonstration.model_validate(value)
        except ValidationError as error:
            raise UsageError(f"{where} is neither of CUDA-L1's release nor a demonstration: take it out") from error
        yield Imported(name, demonstration.task, demonstration.candidate)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise UsageError(f"{path} cannot be read ({reason}): name a file of JSON lines or a folder") from error


def _folders(folder: Path) -> Iterator[Imported]:
    references = sorted(folder.rglob(TASK_FILE))
    if not references:
        raise UsageError(
            f"{folder} holds no kernels that can be told: each {TASK_FILE} needs its kernels beside it, or the folder "
            "is a KernelBench run"
        )
    for reference in references:
        task = task_from_source(read_source(reference), where=str(reference), file=reference.parent.name)
        for kernel in sorted(reference.parent.glob("*.py")):
            if kernel != reference:
                origin = str(kernel.relative_to(folder))
                yield Imported(f"{IMPORT}{folder.name}", task, _candidate(read_source(kernel), origin))


def _candidate(source: str, origin: str) -> Candidate:
    return Candidate(source=source, origin="import", detail=origin)
