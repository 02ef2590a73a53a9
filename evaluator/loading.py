"""The steps `load` and `warm`: two workers from the zygote, a model in each, then first calls and the seal.

Invariants: a worker is confined before foreign code runs; candidate code sees no secret input before the seal; the
first call has a deadline of its own, since it may tune itself.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from evaluator.bench import Bench, Draw
from evaluator.compile import BuildDesk
from evaluator.device import host_memory
from evaluator.observed import Observed
from evaluator.sides import Ended, ReferenceFailed, Side
from evaluator.timing.clock import slots_for, slots_on_device
from evaluator.timing.turns import Arm
from evaluator.worker import schema, wire
from evaluator.worker.process import Child
from evaluator.worker.sandbox import SandboxPlan

if TYPE_CHECKING:
    from evaluator.config import EvaluatorConfig
    from evaluator.device import Device
    from evaluator.session import Evaluator
    from tasks.records import Task

_START_S = 10.0


class SandboxUnavailable(RuntimeError):
    """No layer of isolation is possible on this machine, or the worker could not be confined."""


def spawn(evaluator: Evaluator, desk: BuildDesk) -> tuple[Arm, list[str]]:
    """A confined worker on the arms' cores, stopped, and its layers. Raises SandboxUnavailable, ProcessLost.

    `desk` serves its builds.
    """
    config, device, tools = evaluator.config, evaluator.device, evaluator.toolchain()
    plan = SandboxPlan(
        layers=tuple(config.sandbox.layers), scratch_mib=config.sandbox.scratch_mib, devices=device.nodes,
        fallback_scratch=evaluator.scratch(), cores=device.arm_cores, read=tools.read,
        execute=tools.execute(device.type), accelerator=bool(device.runtime),
    )  # fmt: skip
    child = evaluator.zygote().spawn_worker(plan, {"runtime": device.runtime})
    try:
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
    arm = Arm(child, trusted=False, memory_limit_bytes=config.memory_limit_mib << 20, turn=evaluator.turn())
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


def open_devices(bench: Bench) -> None:
    """Makes both sides' contexts, before candidate code runs. Raises SandboxUnavailable: no candidate is at fault."""
    for side in (bench.candidate, bench.reference):
        try:
            side.open()
        except (Ended, ReferenceFailed) as error:
            ending = bench.observed.ending
            bench.observed.ending = None
            text = ending.detail if ending is not None else str(error)
            raise SandboxUnavailable(f"a confined worker cannot use the device: {text}") from error


def slots(opened: dict[str, Any], device: Device, seats: int = 1) -> tuple[int, int]:
    """How many calls' inputs and outputs the arenas hold, 0 when the task does not fit; and the free bytes.

    So many seats, each with a server and arenas of its own, share what is free.

    An accelerator's memory is what was free when the reference was opened, this machine's what is free now.
    """
    if device.runtime:
        free = int(opened["free_bytes"]) // seats
        return slots_on_device(opened["bytes_per_call"], opened["leaves"], free, opened["call_ms"]), free
    free = free_bytes() // seats
    return slots_for(opened["bytes_per_call"], opened["leaves"], free), free


def free_bytes() -> int:
    """Memory that is free on this machine."""
    return host_memory()[0]


def load(bench: Bench, sources: dict[str, int], config: EvaluatorConfig) -> None:
    """Loads both sides' sources (descriptors) and constructs their models. Raises Ended, ReferenceFailed."""
    opened, observed = bench.server.opened, bench.observed
    for side in (bench.candidate, bench.reference):
        deadline = time.monotonic() + config.deadlines.load_s
        with observed.activity.doing(f"the {side.which}'s source to be imported", config.deadlines.load_s):
            if not side.load(sources[side.which], config.deadlines.load_s):
                observed.end("contract", "the source defines no class ModelNew")
                raise Ended
        side.load_ends_at_s = deadline
    specs = bench.place(2)
    for side in (bench.candidate, bench.reference):
        left_s = max(0.1, round(side.load_ends_at_s + side.arm.served_s - time.monotonic(), 1))
        with observed.activity.doing(f"the {side.which}'s model to be constructed", left_s):
            state = side.construct(opened, specs, left_s)
        if side.which == "candidate":
            side.names = transfer(opened["state"], state, by_order=bench.random_parameters)
            observed.parameters = _transferred(opened["state"], side.names)
            if opened["parameters_matter"]:
                observed.parameters_missing = tuple(name for name in opened["state"] if name not in side.names)
            observed.inspected(side.inspect())


def transfer(wanted: dict[str, list[Any]], given: dict[str, list[Any]], *, by_order: bool) -> dict[str, str]:
    """The candidate's name of each entry of the reference's state that it takes; entries are dtype and shape.

    Equal names count where all fit; else, with `by_order`, the order, where it has the same dtypes and shapes
    throughout, so that a candidate may call its parameters what it likes. Rules that never change parameters do
    without: equal seeds do for them, also where equal shapes mean something else, as in a transposed square weight.
    """
    same = {name: name for name, entry in wanted.items() if given.get(name) == entry}
    if by_order and len(same) < len(wanted) and list(wanted.values()) == list(given.values()):
        return dict(zip(wanted, given, strict=True))
    return same


def _transferred(wanted: dict[str, list[Any]], names: dict[str, str]) -> str:
    """How both arms get equal weights: by loading them where all are taken, else by equal seeds."""
    if not wanted:
        return "none"
    return "loaded" if len(names) == len(wanted) else "seeded"


def warm(bench: Bench, config: EvaluatorConfig) -> None:
    """First calls on throw-away inputs, then the seal."""
    doing, deadlines = bench.observed.activity.doing, config.deadlines
    for words, timeout_s in (("first", deadlines.warm_s), ("second", deadlines.call_s)):
        calls = bench.draw([Draw.fresh(bench.rng)])
        with doing(f"the candidate's {words} call", timeout_s):
            bench.candidate.run(calls, timeout_s=timeout_s)
        with doing(f"the reference's {words} call", deadlines.call_s):
            bench.run_reference(calls)
    bench.device_clock = config.timing.clock == "device" and bench.reference.quickest_launch_ns > 0
    bench.observed.processes_left(bench.candidate.arm.child.descendants())
    for side in (bench.candidate, bench.reference):
        side.ask({"op": "seal", "filter": "seccomp" in config.sandbox.layers}, schema.Sealed, _START_S)


def try_reference(evaluator: Evaluator, task: Task) -> None:
    """Runs the reference alone, in new processes. Raises ReferenceFailed and what starting them raises."""
    server = evaluator.reference(task)
    arm, layers = spawn(evaluator, BuildDesk(evaluator.compile_pool))
    side = Side("reference", arm, layers, Observed(), evaluator.config.deadlines.call_s)
    source = evaluator.text_descriptor(task.source)
    placed = server.ask({"op": "place", "slots": 2, "seed": 0})
    try:
        side.open()
        side.load(source, evaluator.config.deadlines.load_s)
        side.map(placed.descriptors[3:], placed.answer["handles"][3:], placed.answer["drop"])
        side.construct(server.opened, placed.answer["specs"], evaluator.config.deadlines.load_s)
        drawn = server.ask({"op": "draw", "draws": [asdict(Draw.fresh(random.Random()))]})
        side.run(drawn.answer["calls"])
    finally:
        arm.child.kill()
        for number in (source, *placed.descriptors):
            os.close(number)
