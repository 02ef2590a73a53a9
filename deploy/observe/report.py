"""What a run found, from its state: the summary that `summary.json` holds and the table that ends the run.

Invariants: pure; table and summary show the same figures; a kernel counts as found only when it is `new`, and as
confirmed only when a second, full measurement on fresh seeds was accepted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from deploy.graph.events import ControlMeasured, SampleLeft
from deploy.graph.state import RunState
from deploy.observe.progress import LOOP
from tasks.figures import figures, interval, milliseconds, times
from tasks.version import EVALUATOR_VERSION, PACKAGE_VERSION, RECORD_SCHEMA_VERSION

CONTROL_ALARM = "control_alarm"
LABELS = {CONTROL_ALARM: "The evaluator is off by its own controls on a device type: speedups are not to be trusted."}
"""Labels of a run, in one sentence each."""


def summarize(state: RunState, targets: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The run as JSON values."""
    frozen, trained = policy_samples(state)
    return {
        "run_id": state.run_id,
        "versions": {
            "package": PACKAGE_VERSION, "evaluator": EVALUATOR_VERSION, "record_schema": RECORD_SCHEMA_VERSION,
        },
        "status": state.closed or "unfinished",
        "stage": state.stage,
        "policy": {"epoch": state.epoch, "step": state.step},
        "samples": state.ledger.samples.counts(),
        "groups": state.ledger.groups.counts(),
        "reasons": dict(Counter(e.reason for e in state.left.values() if e.reason)),
        "reviews": dict(Counter(e.review for e in state.left.values() if e.review)),
        "copies": sum(e.label == "copy" for e in state.left.values()),
        "labels": sorted({CONTROL_ALARM for control in state.controls.values() if control.alarm}),
        "controls": [_control(control) for _, control in sorted(state.controls.items())],
        "skipped": {name: event.reason for name, event in state.skipped.items()},
        "tasks": [_task(state, task_id, device_type) for task_id, device_type in targets],
        "held_out": [
            event.model_dump(mode="json", exclude={"kind", "at_s"}) for _, event in sorted(state.held_out.items())
        ],
        "frozen_policy": compare(state, frozen, trained),
        "speed": _speed(state),
        "steps": [{"epoch": e.epoch, "step": e.step, **e.metrics} for e in state.steps],
    }  # fmt: skip


def _speed(state: RunState) -> dict[str, Any]:
    """Where the time went. Rates are over the loop's phases; a rate without time is null."""
    seconds = state.seconds_by_phase
    loop_s, generating_s = sum(seconds.get(phase, 0.0) for phase in LOOP), seconds.get("generating", 0.0)
    scored = sum(event.outcome != "cancelled" for event in state.left.values())
    tokens = sum(event.new_tokens for event in state.left.values())
    published: Counter[str] = Counter()
    for publication in state.publications:
        published.update(publication.seconds_by_phase)
    count = len(state.publications)
    return {
        "seconds_by_phase": dict(seconds),
        "samples_per_minute": 60 * scored / loop_s if loop_s else None,
        "new_tokens": tokens,
        "tokens_per_second_generating": tokens / generating_s if generating_s else None,
        "publications": count,
        "publish_seconds_by_phase": {phase: total / count for phase, total in published.items()},
    }


def _task(state: RunState, task_id: str, device_type: str) -> dict[str, Any]:
    seeds = [e for e in state.seeds.values() if (e.task_id, e.device_type) == (task_id, device_type)]
    mine = [e for e in state.left.values() if _key(state, e) == (task_id, device_type)]
    best = state.best(label="new").get((task_id, device_type)) or state.best(label="copy").get((task_id, device_type))
    confirmation = state.confirmed.get(best.sample_id) if best else None
    shown = confirmation if confirmation and confirmation.outcome == "accepted" else best
    reference = next((e.reference_ms for e in [shown, *mine, *seeds] if e and e.reference_ms), None)
    return {
        "task": task_id,
        "device_type": device_type,
        "reference_ms": reference,
        "samples": dict(Counter(e.outcome for e in mine)),
        "best_seed": max((e.speedup for e in seeds if e.outcome == "accepted" and e.speedup), default=None),
        "best": None if best is None or shown is None else {
            "sample": best.sample_id,
            "policy_version": best.policy_version,
            "speedup": shown.speedup,
            "ci_low": shown.ci_low,
            "ci_high": shown.ci_high,
            "label": best.label,
            "confirmed": "no" if confirmation is None else confirmation.outcome,
            "file": best.file,
        },
    }  # fmt: skip


def _control(control: ControlMeasured) -> dict[str, Any]:
    """The references against themselves on one device type under one protocol."""
    return {
        "device_type": control.device_type,
        "protocol": control.protocol,
        "measured": control.measured,
        "failed": control.failed,
        "coverage": control.coverage,
        "bias": math.expm1(control.bias_log),
        "mean_half_width": math.expm1(control.half_width_log),
        "alarm": control.alarm,
    }


def _key(state: RunState, event: SampleLeft) -> tuple[str, str]:
    group = state.groups[event.group_id]
    return group.task_id, group.device_type


def policy_samples(state: RunState) -> tuple[list[SampleLeft], list[SampleLeft]]:
    """Samples of the policy before its first step, and of the trained one: the latest, as many as the former."""
    scored = [
        e for e in state.left.values() if e.outcome != "cancelled" and not state.groups[e.group_id].held_out
    ]  # fmt: skip
    frozen = [e for e in scored if state.groups[e.group_id].policy_step == 0]
    trained = [e for e in scored if state.groups[e.group_id].policy_step > 0]
    count = min(len(frozen), len(trained))
    return frozen[:count] if count else frozen, trained[len(trained) - count :]


def compare(state: RunState, frozen: Sequence[SampleLeft], trained: Sequence[SampleLeft]) -> dict[str, Any]:
    """What equal numbers of samples of both policies found."""
    return {"frozen": _found(state, frozen), "trained": _found(state, trained)}


def _found(state: RunState, events: Iterable[SampleLeft]) -> dict[str, Any]:
    listed = list(events)
    new = [e for e in listed if e.outcome == "accepted" and e.label == "new" and e.speedup]
    best: dict[str, float] = {}
    for event in new:
        task_id = _key(state, event)[0]
        best[task_id] = max(best.get(task_id, 0.0), event.speedup or 0.0)
    return {
        "samples": len(listed),
        "accepted": sum(e.outcome == "accepted" for e in listed),
        "new": len(new),
        "copies": sum(e.label == "copy" for e in listed),
        "best_by_task": best,
        "geometric_mean": math.exp(sum(math.log(v) for v in best.values()) / len(best)) if best else None,
    }


def winners(state: RunState, above: float) -> list[str]:
    """Ids of new kernels sampled in this run whose interval lies above `above` in both of two measurements."""
    return [
        sample_id
        for sample_id, confirmation in state.confirmed.items()
        if confirmation.outcome == "accepted"
        and (confirmation.ci_low or 0.0) > above
        and (event := state.left.get(sample_id)) is not None
        and event.label == "new"
        and (event.ci_low or 0.0) > above
    ]


def table_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Header and rows of the final table."""
    header = ("task", "device", "reference", "best seed", "best sampled", "interval", "label", "file")
    rows: list[tuple[str, ...]] = [header]
    for task in summary["tasks"]:
        best = task["best"]
        reference = "-" if task["reference_ms"] is None else milliseconds(task["reference_ms"])
        seed = "-" if task["best_seed"] is None else times(task["best_seed"])
        if best is None:
            rows.append((task["task"], task["device_type"], reference, seed, "none", "-", "-", "-"))
            continue
        between = interval(best["ci_low"], best["ci_high"]) if best["ci_low"] is not None else "-"
        confirmed = {"accepted": ", confirmed", "no": ""}.get(best["confirmed"], ", not confirmed")
        rows.append(
            (task["task"], task["device_type"], reference, seed, times(best["speedup"]), between,
             best["label"] + confirmed, best["file"] or "-")
        )  # fmt: skip
    return rows


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as aligned text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def control_lines(summary: dict[str, Any]) -> list[str]:
    """One line for each device type and protocol that was measured against itself."""
    return [
        f"controls on {one['device_type']} ({one['protocol']}): {one['measured']} measured, {one['failed']} failed, "
        f"{one['coverage']:.0%} cover 1, bias {one['bias']:+.2%}, half-width {one['mean_half_width']:.1%}"
        + (f"; ALARM: {one['alarm']}" if one["alarm"] else "")
        for one in summary["controls"]
    ]


def held_out_lines(summary: dict[str, Any]) -> list[str]:
    """One line for each held-out set: its figures before the first step and after the last one."""
    by_key: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for row in summary["held_out"]:
        by_key.setdefault((row["name"], row["device_type"], row["exemplars"]), []).append(row)
    return [
        f"held out, {name} on {device_type}, {'with' if exemplars else 'without'} exemplars: "
        + "; ".join(
            f"step {row['step']}: mean log-speedup {row['mean_log_speedup']:.3f}, {row['accepted_share']:.0%} accepted"
            f", {row['above_share']:.0%} above 1.05, {row['distinct_accepted']} distinct of {row['samples']}"
            for row in (rows[at] for at in dict.fromkeys((0, len(rows) - 1)))
        )
        for (name, device_type, exemplars), rows in by_key.items()
    ]


def speed_line(summary: dict[str, Any]) -> str:
    """Where the time went, in one line."""
    speed = summary["speed"]
    parts = [f"{phase} {seconds:.0f} s" for phase, seconds in speed["seconds_by_phase"].items()]
    if speed["samples_per_minute"] is not None:
        parts.append(f"{figures(speed['samples_per_minute'])} samples/min")
    if speed["tokens_per_second_generating"] is not None:
        parts.append(f"{speed['tokens_per_second_generating']:.0f} tokens/s generating")
    if speed["publications"]:
        each_s = sum(speed["publish_seconds_by_phase"].values())
        parts.append(f"weights published {speed['publications']} times in {figures(each_s)} s each")
    return f"time: {', '.join(parts)}"


def comparison_text(summary: dict[str, Any]) -> str:
    """The samples before the first step beside the latest ones, in two lines."""
    words_of = {"frozen": "frozen policy (before the first step)", "trained": "trained policy (latest)"}
    if summary["stage"] == "frozen":
        words_of = {"frozen": "first round of the search", "trained": "latest rounds, same policy"}
    lines = []
    for name, words in words_of.items():
        found = summary["frozen_policy"][name]
        best = ", ".join(f"{task} {times(speedup)}" for task, speedup in sorted(found["best_by_task"].items()))
        lines.append(
            f"{words}: {found['samples']} samples, {found['accepted']} accepted, {found['new']} new, "
            f"{found['copies']} copies; best new: {best or 'none'}"
        )
    return "\n".join(lines)
