"""The steps `check` and `probe`: is every result right, whatever is drawn, and is it the candidate's own work?

Invariants: each check ends the evaluation at the first proven fault; the order is by cost and by how many candidates
fail there; nothing in a check's request tells it from a timed turn's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from evaluator.bench import Bench, Draw
from evaluator.judgement.facts import Determinism, GlobalState, Pending
from evaluator.worker import schema

if TYPE_CHECKING:
    from evaluator.flow import Gate

IDLE_S = 0.02
_TRACED_CALLS = 2


def check(bench: Bench, gate: Gate, draws: int) -> None:
    """Fresh inputs, changed parameters, inputs beyond `get_inputs`, sparse changes and repetitions."""
    loaded = bench.observed.parameters == "loaded"
    kinds = [kind for kind in bench.reference.opened["kinds"] if kind != "as_given"]
    _burst(bench, gate, [Draw.fresh(bench.rng), Draw.fresh(bench.rng)], hold=True)
    if loaded:
        bench.load_parameters(bench.secret())
    first = Draw.fresh(bench.rng)
    _burst(bench, gate, [first, Draw.fresh(bench.rng)], hold=True)
    for index in range(0, len(kinds), 2):
        _burst(bench, gate, [Draw.fresh(bench.rng, kind) for kind in kinds[index : index + 2]], hold=True)
    repeated = [first, Draw(first.seed, first.kind, sparse=bench.secret())]
    _burst(bench, gate, repeated, hold=True)
    bench.observed.determinism = Determinism(repeats=1)
    for _ in range(max(0, draws - 5)):
        _burst(bench, gate, [Draw.fresh(bench.rng)], hold=False)


def _burst(bench: Bench, gate: Gate, draws: list[Draw], *, hold: bool) -> None:
    bench.pair(draws, reference_first=bench.rng.random() < 0.5, hold=hold and not bench.each)
    gate.pass_or_end()


def probe(bench: Bench, gate: Gate) -> None:
    """An idle window after a call, calls under a tracer, and what changed in the worker's process."""
    _idle(bench, gate)
    calls = bench.draw([Draw.fresh(bench.rng) for _ in range(_TRACED_CALLS)])
    request = {"op": "trace", "calls": calls.wired}
    traced, _ = bench.ask(request, schema.Traced, bench.burst_s(20 * _TRACED_CALLS))
    inspected, _ = bench.ask({"op": "inspect"}, schema.Inspected, 10.0)
    observed = bench.observed
    observed.own_work = observed.own_work.model_copy(
        update={
            "calls_traced": traced.calls_traced,
            "calls_with_swallowed": traced.calls_with_swallowed,
            "swallowed": tuple(traced.swallowed),
            "compilers": tuple(inspected.compilers),
        }
    )
    observed.compile = observed.compile.model_copy(update={"routes": tuple(inspected.programs)})
    observed.global_state = GlobalState(replaced=tuple(inspected.replaced), settings=tuple(inspected.settings))
    gate.pass_or_end()


def _idle(bench: Bench, gate: Gate) -> None:
    """Lets the worker go on for a moment after a call: neither its result nor its processors may move."""
    calls = bench.draw([Draw.fresh(bench.rng)])
    bench.reference_turn()
    _, answer = bench.candidate_turn(calls, hold=True)
    bench.compare(calls, answer)
    child = bench.worker.child
    before_ns = child.cpu_ns()
    child.resume()
    time.sleep(IDLE_S)
    child.stop()
    busy_ms = (child.cpu_ns() - before_ns) / 1e6
    bench.ask({"op": "redeliver"}, schema.Redelivered, 10.0)
    late = bench.reference.ask({"op": "late"}).answer["writes"]
    pending = Pending(late_writes=int(late), idle_ms=1e3 * IDLE_S, busy_ms=busy_ms, processes=child.descendants())
    bench.observed.pending = pending
    gate.pass_or_end()
