"""An evaluation for a person's eyes: what was decided, why, and what to do next.

Invariant: everything shown comes from the record, so that `--json` holds all of it; text of candidates and compilers is
never read as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import IO, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tasks.figures import figures, interval, milliseconds, times
from tasks.records import Evaluation, Measurement, Sweep
from tasks.records.profile import Profile
from tasks.shapes import shape_words

STYLES = {"accepted": "green", "rejected": "red", "unscored": "yellow"}
_MAX_COMPILER_LINES = 12
_TABLE_WIDTH = 120
_MAX_PROFILE_ROWS = 12
_OVER = {"eager": "reference", "compile": "compiled reference", "graph": "graph of the reference", "candidate": "other"}
"""What the speedup is over, by what the reference arm ran."""


def print_panel(evaluation: Evaluation, stream: IO[str], *, command: str = "") -> None:
    """Writes the panel; `command` is the line that evaluates the same inputs again. Plain text without a terminal."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    console.print(panel(evaluation))
    if evaluation.profile is not None:
        _print_profile(evaluation.profile, console)
    if _reproducible(evaluation) and command:
        # Outside of the box and unbroken, so that it can be copied.
        console.print(Text(f"Again with the same inputs: {command}"), soft_wrap=True)


def panel(evaluation: Evaluation) -> RenderableType:
    """The panel as something rich can render."""
    parts: list[RenderableType] = []
    if evaluation.message:
        parts.append(Text(evaluation.message))
    rows = list(_rows(evaluation))
    if rows:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, Text(value))
        parts += ["", table]
    compiler = _compiler_text(evaluation)
    if compiler:
        parts += ["", Text(compiler)]
    style = STYLES[evaluation.outcome]
    return Panel(
        Group(*parts), title=Text(title(evaluation), style=f"bold {style}"), title_align="left", border_style=style,
        box=box.ROUNDED, expand=False, padding=(0, 1),
    )  # fmt: skip


def title(evaluation: Evaluation) -> str:
    """`accepted  1.73x  procedural:row_norm/17 on cpu` or `rejected: incorrect  ...`."""
    head: str = evaluation.outcome
    if evaluation.outcome == "accepted" and evaluation.measurement is not None:
        over = "" if evaluation.baseline == "eager" else f" over the {_OVER[evaluation.baseline]}"
        head += f"  {times(evaluation.measurement.speedup)}{over}"
    elif evaluation.reason:
        head += f": {evaluation.reason}"
    return f"{head}  {evaluation.task_id} on {evaluation.device_type}"


def brief(evaluation: Evaluation) -> str:
    """One line: the outcome with the speedup and its interval, or with the reason."""
    measured = evaluation.measurement
    if evaluation.outcome == "accepted" and measured is not None:
        return f"accepted {times(measured.speedup)} ({interval(measured.ci_low, measured.ci_high)})"
    return f"{evaluation.outcome} {evaluation.reason}: {evaluation.message[:120]}"


def sweep_brief(sweep: Sweep) -> str:
    """One line: the outcome over all shapes, the geometric mean and the worst."""
    text = f"{sweep.outcome}, {sweep.accepted} of {len(sweep.evaluations)} shapes accepted"
    if sweep.geometric_mean is not None and sweep.worst is not None:
        worst = f"worst {times(sweep.worst)} at {shape_words(sweep.worst_shape)}"
        text += f", geometric mean {times(sweep.geometric_mean)}, {worst}"
    return text


def print_sweep(sweep: Sweep, stream: IO[str], again: Callable[[str], str]) -> None:
    """Writes the table of all shapes, their geometric mean and the worst; `again` makes a command of a seed.

    Plain text without a terminal.
    """
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, _TABLE_WIDTH)
    console.print(sweep_panel(sweep))
    for one in sweep.evaluations:
        if one.profile is not None:
            console.print(Text(f"\nprofile of {shape_words(one.shape)}"))
            _print_profile(one.profile, console)
    for one in sweep.evaluations:
        if _reproducible(one):
            text = f"Again with the inputs of {shape_words(one.shape)}: {again(str(one.detail['seed']))}"
            console.print(Text(text), soft_wrap=True)


def sweep_panel(sweep: Sweep) -> RenderableType:
    """The panel of a sweep: one row a shape, then what holds over all."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    over = _OVER[sweep.evaluations[0].baseline]
    for name in ("shape", "outcome", "speedup", "interval", over, "candidate"):
        table.add_column(name, overflow="fold", no_wrap=name != "shape")
    for one in sweep.evaluations:
        cells = [shape_words(one.shape), f"{one.outcome}: {one.reason}" if one.reason else one.outcome]
        measured = one.measurement if one.outcome == "accepted" else None
        if measured is not None:
            cells += [times(measured.speedup), interval(measured.ci_low, measured.ci_high)]
            cells += [milliseconds(measured.reference_ms), milliseconds(measured.candidate_ms)]
        table.add_row(*map(Text, cells))
    parts: list[RenderableType] = [table, ""]
    count = len(sweep.evaluations)
    among = "all" if sweep.accepted == count else f"the {sweep.accepted} accepted of"
    if sweep.geometric_mean is not None and sweep.worst is not None:
        parts.append(Text(f"geometric mean  {times(sweep.geometric_mean)} over {among} {count} shapes"))
        parts.append(Text(f"worst           {times(sweep.worst)} at {shape_words(sweep.worst_shape)}"))
    parts += [
        Text(f"{shape_words(one.shape)}: {one.message}") for one in sweep.evaluations if one.outcome != "accepted"
    ]
    first = sweep.evaluations[0]
    parts += map(Text, first.notes)
    parts.append(Text(f"rules {first.rules}, protocol {first.protocol}, {first.precision}, {first.device_type}"))
    style = STYLES[sweep.outcome]
    return Panel(
        Group(*parts), title=Text(f"{sweep.outcome}  {count} shapes", style=f"bold {style}"), title_align="left",
        border_style=style, box=box.ROUNDED, expand=False, padding=(0, 1),
    )  # fmt: skip


def _print_profile(profile: Profile, console: Console) -> None:
    """Kernels or operators by falling time, what the call moves, and how to look deeper."""
    if not console.is_terminal:
        console.width = max(console.width, _TABLE_WIDTH)
    for kind in ("kernel", "operator"):
        rows = [row for row in profile.rows if row.kind == kind]
        if not rows:
            continue
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column(kind, overflow="ellipsis", no_wrap=True)
        for name in ("share", "time a call", "launches", "bytes a call", "GB/s"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows[:_MAX_PROFILE_ROWS]:
            rate = figures(row.bytes / row.us / 1000) if row.bytes and row.us else ""
            moved = "not known" if row.bytes is None else _bytes(row.bytes)
            cells = (row.name, f"{row.share:.1%}", milliseconds(row.us / 1000), f"{row.calls:g}", moved, rate)
            table.add_row(*map(Text, cells))
        console.print(table)
        if len(rows) > _MAX_PROFILE_ROWS:
            console.print(Text(f"[{len(rows) - _MAX_PROFILE_ROWS} more with --json]"))
    for text in _profile_words(profile):
        console.print(Text(text))
    if profile.commands:
        console.print(Text("To look deeper (this runs the candidate alone, outside of the sandbox):"))
        for command in profile.commands:
            console.print(Text(f"  {command}"), soft_wrap=True)


def _profile_words(profile: Profile) -> Iterator[str]:
    if profile.bytes_per_call is not None and profile.gb_per_s is not None:
        moved = f"A call has to move {_bytes(profile.bytes_per_call)} (inputs, parameters, outputs, each once)"
        yield f"{moved}: {figures(profile.gb_per_s)} GB/s at the measured time."
    if profile.flops_per_call:
        yield f"The reference's products and convolutions are {figures(profile.flops_per_call / 1e9)} GFLOP a call."
    if profile.roofline is not None and profile.peak_gb_per_s is not None:
        peaks = f"{figures(profile.peak_gb_per_s)} GB/s"
        if profile.peak_gflop_per_s is not None:
            peaks += f", {figures(profile.peak_gflop_per_s / 1000)} fp32 TFLOP/s"
        yield f"{profile.roofline:.0%} of the roofline, bound by {profile.bound} (peaks by the device: {peaks})."
    yield from profile.unknown
    if profile.rows:
        yield f"Shares are of {profile.calls} calls under the profiler, as the candidate's own process reports them."


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{figures(count / size)} {unit}"
    return f"{count} B"


def _rows(evaluation: Evaluation) -> Iterator[tuple[str, str]]:
    if evaluation.measurement is not None:
        yield from _measured(evaluation.measurement, _OVER[evaluation.baseline])
    yield from _wrong_value(evaluation.detail)
    for name, key in (("defence", "defence"), ("seed", "seed")):
        if evaluation.outcome != "accepted" and evaluation.detail.get(key):
            yield name, str(evaluation.detail[key])
    if evaluation.detail.get("also"):
        yield "also", ", ".join(map(str, evaluation.detail["also"]))
    if evaluation.outcome != "accepted":
        yield "at step", evaluation.step
    if evaluation.against:
        yield "pairs", f"the other candidate ({evaluation.against[:12]}) and this one, each checked by the reference"
    for note in evaluation.notes:
        yield "note", note
    if evaluation.labels:
        yield "labels", ", ".join(evaluation.labels)
    yield "rules", f"{evaluation.rules}, protocol {evaluation.protocol}, {evaluation.precision}"
    yield "isolation", ", ".join(evaluation.isolation) or "none"
    if evaluation.seconds_by_step:
        yield "seconds", ", ".join(f"{step} {value:.2f}" for step, value in evaluation.seconds_by_step.items())


def _measured(measurement: Measurement, over: str) -> Iterator[tuple[str, str]]:
    between = interval(measurement.ci_low, measurement.ci_high)
    yield "speedup", f"{times(measurement.speedup)}, {measurement.confidence:.0%} interval {between}"
    yield over, f"{milliseconds(measurement.reference_ms)} a call ({measurement.definition})"
    yield "candidate", f"{milliseconds(measurement.candidate_ms)} a call"
    confirmed = ", confirmed on fresh seeds" if measurement.confirmed else ""
    placements = f"{measurement.placements} placement{'s' if measurement.placements > 1 else ''}"
    yield "timing", f"{measurement.pairs} pairs over {placements}, ended by {measurement.stopped}{confirmed}"


def _wrong_value(detail: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if detail.get("index") is not None and "got" in detail:
        place = f"output {detail.get('output', '0')}, index {list(detail['index'])}"
        yield "first wrong", f"{place}: got {detail['got']}, expected {detail.get('expected', '?')}"
    if detail.get("error") and detail.get("allowed"):
        yield "error", f"{detail['error']} against a budget of {detail['allowed']}"
    if detail.get("wrong_calls"):
        yield "wrong calls", f"{detail['wrong_calls']} of {detail.get('calls', '?')} on {detail.get('draw', '')} inputs"


def _compiler_text(evaluation: Evaluation) -> str:
    if evaluation.reason != "compile_error":
        return ""
    lines = str(evaluation.detail.get("compiler") or "").splitlines()
    more = [f"[{len(lines) - _MAX_COMPILER_LINES} more lines with --json]"] if len(lines) > _MAX_COMPILER_LINES else []
    return "\n".join([*lines[:_MAX_COMPILER_LINES], *more])


def _reproducible(evaluation: Evaluation) -> bool:
    return evaluation.outcome == "rejected" and bool(evaluation.detail.get("seed"))
