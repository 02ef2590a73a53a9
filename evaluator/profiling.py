"""The profile of an accepted candidate: rows from its worker, the task's work from its server, peaks from the driver.

Invariants: made after the timing and the verdict's facts, so that it changes neither; the rows are the worker's own
word; what is not known is said to be so, never estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from evaluator.bench import Bench, Draw
from evaluator.sides import Ended, ReferenceFailed
from evaluator.worker import schema
from evaluator.worker.process import ProcessLost
from tasks.records import Measurement
from tasks.records.profile import Bound, Profile, ProfileRow

if TYPE_CHECKING:
    from evaluator.device import Device

DEADLINE_S = 60.0
_SECONDS = 0.3
_MOST_ROUNDS = 20


def profile(bench: Bench, device: Device, measurement: Measurement, precision: str) -> Profile:
    """Profiles the candidate of a finished timing; its worker is good for nothing else afterwards."""
    side = bench.candidate
    side.detach()
    side.ends_at_s = float("inf")
    rounds = max(1, min(_MOST_ROUNDS, round(1000 * _SECONDS / measurement.candidate_ms / 2)))
    try:
        work = bench.server.ask({"op": "work"}).answer
        calls = bench.draw([Draw.fresh(bench.rng), Draw.fresh(bench.rng)])
        request = {"op": "profile", "calls": calls, "rounds": rounds}
        answer, _ = side.ask(request, schema.Profiled, DEADLINE_S)
    except (Ended, ReferenceFailed, ProcessLost):
        return Profile(unknown=(f"The profile failed: {side.last_failure or 'the worker or the server is gone'}.",))
    peaks = bench.gauges.peaks() if bench.gauges is not None else {}
    return concluded(answer, work, peaks, measurement, precision, device.type)


def concluded(
    seen: schema.Profiled, work: Mapping[str, int], peaks: Mapping[str, float], measurement: Measurement,
    precision: str, device_type: str,
) -> Profile:  # fmt: skip
    """The profile from what the worker, the server and the driver say.

    The least time is that of the larger of two parts: bytes over the memory's peak; on fp32 tasks, arithmetic over the
    fp32 units' peak (Williams et al. 2009, the roofline model).
    """
    moved = work["input_bytes"] + work["parameter_bytes"] + work["output_bytes"]
    flops = work["flops"] or None
    seconds = measurement.candidate_ms / 1000
    memory, arithmetic = peaks.get("bytes_per_s"), peaks.get("fp32_per_s")
    least: dict[Bound, float] = {"memory": moved / memory} if memory else {}
    if arithmetic and flops and precision == "fp32":
        least["arithmetic"] = flops / arithmetic
    bound: Bound = max(least, key=lambda name: least[name]) if memory else ""
    return Profile(
        calls=seen.calls, rows=_rows(seen), bytes_per_call=moved, flops_per_call=flops, gb_per_s=moved / seconds / 1e9,
        peak_gb_per_s=memory / 1e9 if memory else None, peak_gflop_per_s=arithmetic / 1e9 if arithmetic else None,
        roofline=least[bound] / seconds if bound else None, bound=bound,
        unknown=tuple(_unknown(seen, flops, memory, arithmetic, precision, device_type)),
    )  # fmt: skip


def _rows(seen: schema.Profiled) -> tuple[ProfileRow, ...]:
    whole = {kind: sum(row.ns for row in seen.rows if row.kind == kind) for kind in ("operator", "kernel")}
    return tuple(
        ProfileRow(
            name=row.name, kind=row.kind, calls=row.count / seen.calls, us=row.ns / seen.calls / 1000,
            share=row.ns / whole[row.kind] if whole[row.kind] else 0.0, bytes=row.bytes if row.bytes >= 0 else None,
        )
        for row in seen.rows
    )  # fmt: skip


def _unknown(
    seen: schema.Profiled, flops: int | None, memory: float | None, arithmetic: float | None, precision: str,
    device_type: str,
) -> list[str]:  # fmt: skip
    found = []
    if memory is None:
        found.append(
            f"The peaks of this device ({device_type}) are not known, so no fraction of its roofline is given."
        )
    if flops is None:
        found.append("The arithmetic is not known: the reference has no product or convolution to count it by.")
    elif arithmetic is not None and precision != "fp32":
        found.append(f"The peak of {precision} arithmetic is not known, so only memory bounds the roofline.")
    if any(row.bytes < 0 for row in seen.rows):
        found.append("Bytes are known for PyTorch's operators alone, not for the candidate's own kernels.")
    return found
