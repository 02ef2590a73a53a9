"""The procedural suite: unlimited generated tasks in families, with seed kernels for those that are trained on.

Invariants: `generate` is a pure function of family, index and size, on every machine; both sizes of an index combine
the same sub-skills; `HELD_OUT_FAMILIES` have no seed kernels; nothing here imports torch.
"""

from __future__ import annotations

from tasks.errors import UsageError
from tasks.procedural import (
    distances,
    elementwise,
    layout,
    matmul_epilogue,
    pooling,
    row_norm,
    row_reduce,
    scans,
    softmax,
    stencil,
    structured_matmul,
)
from tasks.procedural.family import Draw, Family, Size, Spec
from tasks.procedural.seeding import SeedKernel, seeds_of
from tasks.records import Task
from tasks.records.task import Mode, Precision

_FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        elementwise, row_reduce, row_norm, softmax, matmul_epilogue, structured_matmul, pooling, stencil, layout,
        scans, distances,
    )
}  # fmt: skip

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
HELD_OUT_FAMILIES: tuple[str, ...] = tuple(name for name in FAMILIES if _FAMILIES[name].held_out)
TRAINING_FAMILIES: tuple[str, ...] = tuple(name for name in FAMILIES if not _FAMILIES[name].held_out)

DEMO_TASKS: tuple[str, ...] = (
    "procedural:pooling/2",
    "procedural:pooling/9",
    "procedural:structured_matmul/1",
    "procedural:structured_matmul/56",
)
"""Tasks of the demo (`cpu` size): short references of training families whose fast torch seeds are far above the
reference on one thread, whatever the allocator does. The second and fourth are held-out compositions."""

__all__ = [
    "DEMO_TASKS", "FAMILIES", "HELD_OUT_FAMILIES", "TRAINING_FAMILIES", "SeedKernel", "generate", "seed_kernels",
]  # fmt: skip


def generate(
    family: str, index: int, size: Size = "gpu", *, precision: Precision = "fp32", mode: Mode = "as_given"
) -> Task:
    """Task `index` (>= 0) of a family; its id is `procedural:<family>/<index>`. UsageError for an unknown family."""
    spec = _spec(family, index, size)
    return Task(
        id=f"procedural:{family}/{index}",
        source=spec.source,
        name=f"{family}_{spec.kind}",
        suite="procedural",
        family=family,
        composition=tuple(sorted(set(spec.skills))),
        precision=precision,
        mode=mode,
    )


def seed_kernels(task: Task) -> list[SeedKernel]:
    """Verified kernels for a generated task, slowest class first; none for held-out families and other suites.

    Of a template's parameter each task gets few of the possible values: a policy that learned from many tasks knows
    more of them, so that what it writes need not be one of this task's seeds.

    The task's id says how it was drawn and its source at which size; UsageError for a source that the id does not give.
    """
    if task.suite != "procedural" or task.family not in TRAINING_FAMILIES:
        return []
    index = int(task.id.rpartition("/")[2])
    for size in ("cpu", "gpu"):
        spec = _spec(task.family, index, size)
        if spec.source == task.source:
            return seeds_of(task.family, spec, size, Draw("seeds", task.family, index))
    raise UsageError(f"{task.id} is not what this version generates for that id; load the task again by its id")


def _spec(family: str, index: int, size: Size) -> Spec:
    known = _FAMILIES.get(family)
    if known is None:
        raise UsageError(f"unknown procedural family {family!r}; the families are {', '.join(FAMILIES)}")
    if index < 0:
        raise UsageError(f"procedural:{family}/{index} has a negative index; give 0 or more")
    return known.draw(Draw(family, index), size)
