"""Kernels from elsewhere as tasks and claims: CUDA-L1's released lines and KernelBench run folders.

Invariants: a number from elsewhere is only ever a claim; what cannot be used is counted with its reason, never dropped
silently.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from exemplar_store.errors import StoreUsageError
from exemplar_store.filed import Claim
from tasks.records import Candidate, Task

UNKNOWN_DEVICE = "unknown"
"""Device type of claims whose source does not say where they were measured."""
CUDA_L1_FIELDS = frozenset({"level_id", "task_id", "ref_code", "custom_code"})
_KERNEL_FILE = re.compile(r"^level_(\d+)_problem_(\d+)_sample_(\d+)_kernel\.py$")

Found = tuple[Task, Claim]


def is_cuda_l1(line: dict[str, Any]) -> bool:
    """True for a line of CUDA-L1's release."""
    return line.keys() >= CUDA_L1_FIELDS


def read_cuda_l1(line: dict[str, Any], device_type: str, skipped: Counter[str]) -> Found | None:
    """Task and claim of one line: `ref_code` is the task, `score_default` the claim; None when there is no kernel.

    The release writes a missing kernel as null, as an empty text, or as the text "None".
    """
    code, reference = line["custom_code"], line["ref_code"]
    if not isinstance(reference, str) or not reference.strip():
        skipped["no ref_code"] += 1
        return None
    if not isinstance(code, str) or code.strip() in ("", "None"):
        skipped["no custom_code"] += 1
        return None
    name = f"cuda-l1:{line['level_id']}/{line['task_id']}"
    level = line["level_id"] if isinstance(line["level_id"], int) else None
    task = Task(id=name, source=reference, suite="cuda-l1", level=level)
    return task, _claim(task, code, device_type, _score(line.get("score_default")), name)


def is_kernelbench_run(folder: Path) -> bool:
    """True for a folder in which KernelBench left generated kernels."""
    return folder.is_dir() and any(_KERNEL_FILE.match(path.name) for path in folder.iterdir())


def read_kernelbench_run(
    folder: Path, device_type: str, load_task: Callable[[str], Task], skipped: Counter[str]
) -> Iterator[Found]:
    """Tasks and claims of a run folder's kernels, in the order of their names.

    `load_task` finds a task by its id, as in `kernelbench:2/18`. Kernels that the folder's own results call wrong are
    skipped; a speedup is claimed where those results have both run times.
    """
    results = _own_results(folder)
    named = sorted((path for path in folder.iterdir() if _KERNEL_FILE.match(path.name)), key=lambda path: path.name)
    for path in named:
        level, problem, sample = (int(digits) for digits in _KERNEL_FILE.findall(path.name)[0])
        code = path.read_text(errors="replace")
        result = results.get((problem, sample), {})
        if not (result.get("compiled", True) and result.get("correctness", True)):
            skipped["wrong by its own results"] += 1
        elif not code.strip():
            skipped["empty kernel"] += 1
        else:
            task = load_task(f"kernelbench:{level}/{problem}")
            yield task, _claim(task, code, device_type, _ratio(result), f"{folder.name}/{path.name}")


def _own_results(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """(problem, sample) -> what `eval_results.json` says of it; nothing without that file."""
    path = folder / "eval_results.json"
    if not path.exists():
        return {}
    try:
        results = json.loads(path.read_text())
        listed = [
            (int(problem), result)
            for problem, samples in results.items()
            for result in (samples if isinstance(samples, list) else [samples])
        ]
        return {(problem, int(result.get("sample_id", 0))): result for problem, result in listed}
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreUsageError(
            f"{path} does not have KernelBench's results by problem number ({error}): repair or remove it"
        ) from error


def _ratio(result: dict[str, Any]) -> float | None:
    """Reference's run time over the kernel's; KernelBench writes -1 for what it did not measure, or nothing."""
    reference, kernel = _score(result.get("ref_runtime")), _score(result.get("runtime"))
    return _score(reference / kernel) if reference and kernel else None


def _claim(task: Task, code: str, device_type: str, speedup: float | None, origin: str) -> Claim:
    candidate = Candidate(source=code, origin="import", detail=origin)
    return Claim(
        task_id=task.id, task_hash=task.content_hash, device_type=device_type, precision=task.precision, source=code,
        candidate_hash=candidate.content_hash, claimed_speedup=speedup, origin=origin,
    )  # fmt: skip


def _score(value: Any) -> float | None:
    """A positive number, or None: the release has null and, in one file, numbers as text."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 < number < float("inf") else None
