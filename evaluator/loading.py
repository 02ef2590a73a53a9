"""The step `load`: a worker from the zygote, the candidate's module and model in it, warmed up and sealed.

Invariants: the worker is confined before candidate code runs; candidate code sees no secret input before the seal; the
first call has a deadline of its own, since it may tune itself.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from evaluator.bench import Bench, Draw, Ended
from evaluator.compile import BuildDesk
from evaluator.timing.turns import Arm
from evaluator.worker import schema, wire
from evaluator.worker.process import Child
from evaluator.worker.sandbox import SandboxPlan

if TYPE_CHECKING:
    from evaluator.config import EvaluatorConfig
    from evaluator.device import Device
    from evaluator.observed import Observed
    from evaluator.session import Evaluator

_START_S = 10.0


class SandboxUnavailable(RuntimeError):
    """No layer of isolation is possible on this machine, or the worker could not be confined."""


def spawn(evaluator: Evaluator, desk: BuildDesk) -> tuple[Arm, list[str]]:
    """A confined worker, stopped, and its layers. Raises SandboxUnavailable, ProcessLost.

    `desk` serves its builds.
    """
    config, device, tools = evaluator.config, evaluator.device, evaluator.toolchain()
    plan = SandboxPlan(
        layers=tuple(config.sandbox.layers), scratch_mib=config.sandbox.scratch_mib, devices=device.nodes,
        fallback_scratch=evaluator.scratch(), read=tools.read, execute=tools.execute(device.type),
    )  # fmt: skip
    child = evaluator.zygote().spawn_worker(plan)
    try:
        os.sched_setaffinity(child.pid, set(device.arm_cores))
        layers = _layers(child)
        if not layers and not config.sandbox.allow_unsandboxed:
            raise SandboxUnavailable(
                "no isolation layer works on this machine: allow user namespaces, landlock or seccomp, or set "
                "sandbox.allow_unsandboxed for candidates that you trust"
            )
        child.stop()
    except BaseException:
        child.kill()
        raise
    arm = Arm(child, trusted=False, memory_limit_bytes=config.memory_limit_mib << 20)
    arm.serve = desk.serve
    return arm, layers


def _layers(child: Child) -> list[str]:
    try:
        message = wire.receive(child.channel, _START_S)
    except (wire.WireClosed, wire.WireTimeout) as error:
        raise SandboxUnavailable("the worker ended before it was confined") from error
    if message.get("op") != "ready":
        raise SandboxUnavailable(f"the worker could not be confined: {message.get('text', '')}")
    return [str(layer) for layer in message["layers"]]


def load(bench: Bench, observed: Observed, source: int, config: EvaluatorConfig) -> None:
    """Loads the candidate's source (a descriptor) and constructs its model. Raises Ended."""
    opened = bench.reference.opened
    deadline = time.monotonic() + config.deadlines.load_s
    answer, _ = bench.ask({"op": "load"}, schema.Loaded, config.deadlines.load_s, (source,))
    if not answer.defined:
        observed.end("contract", "load", "the source defines no class ModelNew")
        raise Ended
    placed = bench.place(2)
    request = {
        "op": "construct", "tree": opened["arguments"], "specs": placed["specs"], "seed": opened["construct_seed"],
        "train": opened["train"], "dtype": opened["dtype"],
    }  # fmt: skip
    made, _ = bench.ask(request, schema.Constructed, max(0.1, deadline + bench.worker.served_s - time.monotonic()))
    observed.parameters = _transfer(opened["state"], {name: [e.dtype, e.shape] for name, e in made.state.items()})


def _transfer(wanted: dict[str, list[object]], given: dict[str, list[object]]) -> str:
    """How both arms get equal weights: `loaded` when every name of the reference fits, `seeded` when some do not."""
    if not wanted:
        return "none"
    fits = all(name in given and given[name] == entry for name, entry in wanted.items())
    return "loaded" if fits else "seeded"


def warm(bench: Bench, config: EvaluatorConfig) -> float:
    """First calls on throw-away inputs, then the seal; returns the seconds of the first call."""
    calls = bench.draw([Draw.fresh(bench.rng)])
    begin = time.monotonic()
    bench.candidate_turn(calls, timeout_s=config.deadlines.warm_s)
    first_s = time.monotonic() - begin
    turn, _ = bench.candidate_turn(bench.draw([Draw.fresh(bench.rng)]))
    bench.observed.candidate_call_s = turn.span_ns / 1e9
    bench.observed.processes_left(bench.worker.child.descendants())
    bench.ask({"op": "seal", "filter": "seccomp" in config.sandbox.layers}, schema.Sealed, _START_S)
    return first_s


def free_bytes(device: Device) -> int:
    """Memory that is free on the device."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
