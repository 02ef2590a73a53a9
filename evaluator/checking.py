"""The steps `check` and `probe`: is every result right, whatever is drawn, and is it the candidate's own work?

Invariants: each check ends the evaluation at the first proven fault; the order is by cost and by how many candidates
fail there; nothing in a check's request tells it from a timed turn's.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from evaluator.bench import Bench, Draw
from evaluator.judgement.facts import Degenerate, Determinism, Pending
from evaluator.worker import schema

if TYPE_CHECKING:
    from evaluator.flow import Gate

IDLE_S = 0.02
_TRACED_CALLS = 2


def check(bench: Bench, gate: Gate, draws: int) -> None:
    """Fresh inputs, changed parameters, inputs beyond `get_inputs`, sparse changes and repetitions."""
    rng, opened, parameters = bench.rng, bench.server.opened, bench.observed.parameters
    loaded = parameters == "loaded" and bench.random_parameters and "parameter_tracking" in bench.on
    beyond = opened["kinds"] if "whole_domain" in bench.on else []
    kinds = [kind for kind in beyond if kind not in ("as_given", "exact")]
    _burst(bench, gate, [Draw.fresh(rng), Draw.fresh(rng)])
    if opened["degenerate"] and "degenerate_task" in bench.on:
        _constant(bench, gate)
    if loaded:
        bench.load_parameters(bench.secret(), "unit")
    first = Draw.fresh(rng)
    _burst(bench, gate, [first, Draw.fresh(rng)])
    was_right = _right(bench)
    if bench.random_parameters:
        bench.compare_buffers()
        gate.pass_or_end()
    for index in range(0, len(kinds), 2):
        _burst(bench, gate, [Draw.fresh(rng, kind) for kind in kinds[index : index + 2]])
    changed = Draw(first.seed, sparse=bench.secret())
    if "determinism" in bench.on:
        _repeat(bench, gate, [first, changed], was_right)
    else:
        _burst(bench, gate, [changed])
    if "exact" in beyond and bench.random_parameters:
        _exact(bench, gate, loaded)
    elif loaded:
        bench.load_parameters(bench.secret())
    for _ in range(max(0, draws - 6)):
        _burst(bench, gate, [Draw.fresh(rng)], hold=False)


def _repeat(bench: Bench, gate: Gate, draws: list[Draw], was_right: bool) -> None:
    """Inputs for the second time, the first of `draws`: two right answers differ by no more than the error budget."""
    _run(bench, gate, draws)
    differing = int(_right(bench) != was_right)
    bench.observed.determinism = Determinism(
        reference_repeats=bench.server.opened["repeats"], repeats=1, differing=differing
    )
    bench.observed.news()
    gate.pass_or_end()


def _right(bench: Bench) -> bool:
    """Whether the first result of the calls that were compared last is right."""
    first = bench.compared[0]
    return first is not None and not first.aspects


def _exact(bench: Bench, gate: Gate, loaded: bool) -> None:
    """Small integers, on which a linear task makes no rounding error whatever the order of its sums."""
    if loaded:
        bench.load_parameters(bench.secret(), "exact")
    _burst(bench, gate, [Draw.fresh(bench.rng, "exact")])
    if loaded:
        bench.load_parameters(bench.secret())


def _constant(bench: Bench, gate: Gate) -> None:
    """On a task whose output hardly depends on its input: does the candidate look at its input at all?"""
    seen = Degenerate(task=True)
    bench.observed.degenerate = seen.model_copy(update={"adversaries": tuple(bench.server.opened["passed"])})
    one = Draw.fresh(bench.rng)
    for second, key in ((Draw.fresh(bench.rng), "output_repeats"), (replace(one, poison=True), "ignores_poison")):
        calls = bench.draw([one, second])
        bench.run_reference(calls)
        _, results = bench.candidate.run(calls)
        candidate, reference = bench.relate(results)
        if candidate and not reference:
            bench.observed.degenerate = bench.observed.degenerate.model_copy(update={key: True})
    bench.observed.news()
    gate.pass_or_end()


def _burst(bench: Bench, gate: Gate, draws: list[Draw], *, hold: bool = True) -> None:
    _run(bench, gate, draws, hold=hold)
    gate.pass_or_end()


def _run(bench: Bench, gate: Gate, draws: list[Draw], *, hold: bool = True) -> None:
    hold = hold and not bench.each and "output_lifetime" in bench.on
    bench.pair(draws, reference_first=bench.rng.random() < 0.5, hold=hold)
    if hold and "pending_work" in bench.on and gate.closed():
        _go_on(bench)  # wrong, or only late? What lay in its memory before says nothing about the candidate
        late = 0 if bench.observed.gives_memory_again else _late_writes(bench)  # a later call's writes are none
        bench.observed.pending = Pending(late_writes=late, idle_ms=1e3 * IDLE_S)
        bench.observed.news()


def probe(bench: Bench, gate: Gate) -> None:
    """An idle window after a call, calls under a tracer, and what changed in the worker's process."""
    if "pending_work" in bench.on:
        _idle(bench, gate)
    if "fallback" in bench.on:
        _trace(bench)
    bench.observed.inspected(bench.candidate.inspect())
    gate.pass_or_end()


def _trace(bench: Bench) -> None:
    calls = bench.draw([Draw.fresh(bench.rng) for _ in range(_TRACED_CALLS)])
    side = bench.candidate
    traced, _ = side.ask({"op": "trace", "calls": calls}, schema.Traced, side.burst_s(20 * _TRACED_CALLS))
    bench.observed.traced(traced)


def _idle(bench: Bench, gate: Gate) -> None:
    """Lets the worker go on for a moment after a call: neither its result nor its processors may move."""
    calls = bench.draw([Draw.fresh(bench.rng)])
    bench.run_reference(calls)
    _, results = bench.candidate.run(calls, hold=True)
    bench.compare(results)
    busy_ms, left = _go_on(bench), bench.candidate.arm.child.descendants()
    late = _late_writes(bench)
    bench.observed.pending = Pending(late_writes=late, idle_ms=1e3 * IDLE_S, busy_ms=busy_ms, processes=left)
    bench.observed.news()
    gate.pass_or_end()


def _go_on(bench: Bench) -> float:
    """Lets the worker go on for a moment; returns the milliseconds of processor time that it used."""
    child = bench.candidate.arm.child
    before_ns, _ = child.cpu_ns()
    child.resume()
    time.sleep(IDLE_S)
    child.stop()
    return (child.cpu_ns()[0] - before_ns) / 1e6


def _late_writes(bench: Bench) -> int:
    """Calls of the last burst whose held results have changed since they were taken."""
    bench.candidate.ask({"op": "redeliver"}, schema.Redelivered, 10.0)
    return int(bench.server.ask({"op": "late"}).answer["writes"])
