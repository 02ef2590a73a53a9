"""Generated tasks: deterministic, unlimited, short, and no degenerate reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import UsageError
from tasks.procedural import (
    DEMO_TASKS,
    FAMILIES,
    HELD_OUT_FAMILIES,
    TRAINING_FAMILIES,
    generate,
    seed_kernels,
)  # fmt: skip
from tasks.procedural.family import Draw
from tasks.procedural.seeding import SPEEDS, rows_of_block
from tasks.records import Task
from tasks.reference_source import check_task_source
from tasks.splits import split_of
from tasks.suites import load_task

REFERENCE_TOKENS = 130
SEED_TOKENS = 150
MEDIAN_TOKENS = 110


def test_draws_are_fixed_for_ever() -> None:
    """SHA-256 of `row_norm/17#1` and `#2`, first 8 bytes modulo 1000; a change here changes every task."""
    draw = Draw("row_norm", 17)
    assert [draw.integer(0, 999) for _ in range(2)] == [426, 615]


def test_generation_does_not_depend_on_the_process() -> None:
    code = "from tasks.procedural import *; print([generate(f, 5, 'cpu').content_hash for f in FAMILIES])"
    root = str(Path(__file__).parents[2])
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root}
        out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert out.stdout.strip() == str([generate(f, 5, "cpu").content_hash for f in FAMILIES])


@pytest.mark.parametrize("family", FAMILIES)
def test_tasks_are_well_formed_and_mostly_different(family: str) -> None:
    tasks = [generate(family, index, size) for index in range(150) for size in ("cpu", "gpu")]
    for task in tasks:
        check_task_source(task.source, task.id)
    assert len({task.content_hash for task in tasks}) > 280


@pytest.mark.parametrize("family", FAMILIES)
def test_both_sizes_combine_the_same_sub_skills(family: str) -> None:
    for index in range(100):
        small, large = generate(family, index, "cpu"), generate(family, index, "gpu")
        assert small.composition == large.composition
        assert small.id == large.id
        assert small.content_hash != large.content_hash
        assert 2 <= len(small.composition) <= 6


@pytest.mark.parametrize("family", FAMILIES)
def test_references_are_seed_sensitive_and_finite_on_the_whole_domain(family: str) -> None:
    torch = pytest.importorskip("torch")
    for index in range(6):
        names: dict[str, Any] = {}
        exec(generate(family, index, "cpu").source, names)
        with torch.no_grad():
            model = names["Model"](*names["get_init_inputs"]())
            torch.manual_seed(1)
            inputs = names["get_inputs"]()
            torch.manual_seed(2)
            others = names["get_inputs"]()
            result, other = model(*inputs), model(*others)
            assert result.dtype == torch.float32
            assert 0.005 < result.std().item() < 100, (family, index)
            assert (result - other).std() > 0.1 * result.std()
            for change in (lambda x: x + 4, lambda x: 8 * x, lambda x: x / 8, lambda x: -x):
                changed = [change(x) if x.is_floating_point() else x for x in inputs]
                assert model(*changed).isfinite().all(), (family, index)


@pytest.mark.parametrize("family", TRAINING_FAMILIES)
@pytest.mark.parametrize("size", ["cpu", "gpu"])
def test_training_families_have_seeds_of_three_speeds(family: str, size: Any) -> None:
    for index in range(60):
        task = generate(family, index, size)
        seeds = seed_kernels(task)
        assert {seed.speed for seed in seeds} == set(SPEEDS), task.id
        assert len({seed.source for seed in seeds}) == len(seeds)
        for seed in seeds:
            compile(seed.source, seed.name, "exec")
            assert "${" not in seed.source
            assert "class ModelNew(" in seed.source
            assert seed.reason.endswith(".")
            assert len(seed.reason.split()) <= 16
        assert sum(bool(seed.parameters) for seed in seeds) >= 2


def test_each_task_gets_few_values_of_a_parameter_and_many_tasks_get_all() -> None:
    """A template with 13 values gives 2 a task: over 200 tasks of the family nearly all are seen."""
    seen: set[int] = set()
    for index in range(200):
        task = generate("pooling", index, "cpu")
        groups = [s.parameters["GROUP"] for s in seed_kernels(task) if s.name.startswith("rows_first-")]
        assert len(groups) in (0, 2)
        assert seed_kernels(task) == seed_kernels(task)
        seen.update(groups)
    assert len(seen) >= 12


@pytest.mark.parametrize("family", HELD_OUT_FAMILIES)
def test_held_out_families_have_no_seeds(family: str) -> None:
    assert seed_kernels(generate(family, 0, "cpu")) == []


def test_seeds_are_only_for_what_the_id_generates() -> None:
    task = generate("elementwise", 3, "cpu")
    other = Task.model_validate(task.model_dump() | {"id": "procedural:elementwise/4"})
    with pytest.raises(UsageError, match="load the task again"):
        seed_kernels(other)
    assert seed_kernels(Task(id="file:1", source=task.source)) == []


def test_unknown_families_and_negative_indices_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="unknown procedural family 'rownorm'; the families are elementwise"):
        generate("rownorm", 0, "cpu")
    with pytest.raises(UsageError, match="negative"):
        generate("row_norm", -1, "cpu")


def test_a_block_is_a_power_of_two_of_rows() -> None:
    """64 KiB hold 16384 floats: 21 rows of 768, of which 16 is the power of two below; never less than one row."""
    assert (rows_of_block(64, 768), rows_of_block(64, 1024), rows_of_block(1, 4096)) == (16, 16, 1)


def test_the_demo_has_held_in_and_held_out_compositions() -> None:
    tasks = [load_task(ref, size="cpu") for ref in DEMO_TASKS]
    assert len(tasks) >= 4
    assert all(task.family in TRAINING_FAMILIES for task in tasks)
    assert {split_of(task) for task in tasks} >= {"held_out_composition"}
    assert "held_out_family" not in {split_of(task) for task in tasks}


def test_demo_families_fit_the_token_budget() -> None:
    """References and CPU seeds in torch, counted by the policy's tokenizer; the C seeds are too long for the demo."""
    folder = os.environ.get("KONTRAST_MODEL")
    if not folder:
        pytest.skip("KONTRAST_MODEL is not set: no tokenizer to count with")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def count(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    for family in {load_task(ref, size="cpu").family for ref in DEMO_TASKS}:
        tasks = [generate(family, index, "cpu") for index in range(40)]
        references = sorted(count(task.source) for task in tasks)
        seeds = sorted(count(s.source) for task in tasks for s in seed_kernels(task) if s.style == "torch")
        assert references[-1] <= REFERENCE_TOKENS, family
        assert references[20] <= MEDIAN_TOKENS, family
        assert seeds[-1] <= SEED_TOKENS, family
        assert seeds[len(seeds) // 2] <= MEDIAN_TOKENS + 10, family
