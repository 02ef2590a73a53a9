"""What a worker does after it was isolated: load, warm, sealed; one request at a time. Both arms are such workers.

Invariants: every request of the judge gets exactly one answer, in order; candidate code runs only inside a request;
whatever it raises, BaseException included, becomes an answer `failed` that names stage, kind and place. Nothing of the
project stays importable for the candidate, and nothing here is secret.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from functools import cache
from socket import socket
from typing import Any

import torch

from evaluator.compile import shim
from evaluator.worker import backend, burst, confine, native, profiling, trace, tripwire, wire
from evaluator.worker.arena import Arena
from evaluator.worker.tree import TensorSpec, unflatten

_TEXT_LIMIT = 4000
_FILE = "candidate.py"
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
_kept: list[types.ModuleType] = []
_FORGOTTEN = frozenset(("evaluator", "tasks", "__main__", "__mp_main__"))

Answer = dict[str, Any]


class NotAModel(TypeError):
    """The class made something else than a torch.nn.Module."""


class Worker:
    """State of one worker: its model, the arenas, the results that a caller would still hold."""

    def __init__(self, device: backend.Backend) -> None:
        self._device = device
        self._inputs = self._outputs = self._parameters = Arena.create(0)
        self._model: Any = None
        self._earlier: list[burst.Range] = []
        self._held: list[tuple[Any, list[list[int]]]] = []
        self._trace = trace.CallTrace(_path())
        self._compilers = trace.CompilerWatch()
        self._functions = tripwire.functions()
        self._settings = tripwire.settings()

    def open(self) -> Answer:
        """Makes this process's context on the device; no candidate code has run yet."""
        self._device.open()
        return {"op": "opened"}

    def load(self, class_name: str, fds: list[int]) -> Answer:
        """Runs the source as a module; answers whether it defines the class that was asked for."""
        text = wire.read_text(fds[0])
        module = types.ModuleType("candidate")
        module.__file__ = _path()
        sys.modules["candidate"] = module
        with open(_FILE, "w") as file:  # inspect.getsource and compilers of annotated functions read it
            file.write(text)
        exec(compile(text, module.__file__, "exec"), module.__dict__)
        return {"op": "loaded", "defined": isinstance(module.__dict__.get(class_name), type)}

    def construct(
        self, class_name: str, tree: Any, specs: list[Any], seed: int, train: bool, dtype: str, quiet: bool
    ) -> Answer:
        """Makes the model from its arguments; answers names, dtypes and shapes of its state."""
        tensors = [burst.view(self._parameters, TensorSpec.from_wire(spec)).clone() for spec in specs]
        torch.manual_seed(seed)
        model = sys.modules["candidate"].__dict__[class_name](*unflatten(tree, tensors))
        if not isinstance(model, torch.nn.Module):
            raise NotAModel(f"{class_name} made a {type(model).__name__}, not a torch.nn.Module")
        model.to(self._device.device, native.DTYPES[dtype])
        model.train(train)
        if quiet:
            _quieten(model)
        self._model = model
        return {"op": "constructed", "state": {name: _entry(value) for name, value in model.state_dict().items()}}

    def map(self, handles: list[Any], drop: bool, fds: list[int] | None = None) -> Answer:
        """Takes new arenas, by descriptors or handles: inputs, outputs, parameters.

        Free memory is given back, so that results too lie elsewhere on each placement.
        """
        self._held, self._earlier = [], []
        for arena in (self._inputs, self._outputs, self._parameters):
            arena.release()
        self._inputs, self._outputs, self._parameters = self._device.attach(fds or [], handles, drop)
        self._device.trim()
        return {"op": "mapped"}

    def parameters(self, entries: dict[str, Any]) -> Answer:
        """Loads the state that lies in the parameter arena, in place."""
        state = {name: burst.view(self._parameters, TensorSpec.from_wire(spec)) for name, spec in entries.items()}
        missing, unexpected = self._model.load_state_dict(state, strict=False)
        return {"op": "took", "missing": [str(name) for name in missing], "unexpected": [str(n) for n in unexpected]}

    def state(self, entries: dict[str, Any]) -> Answer:
        """Writes entries of the model's state to their places in the parameter arena; answers those it has not."""
        state, missing = torch.nn.Module.state_dict(self._model), []
        for name, wired in entries.items():
            value, spec = state.get(name), TensorSpec.from_wire(wired)
            if value is None or native.spec_of(value).dtype != spec.dtype or tuple(value.shape) != spec.shape:
                missing.append(name)
            else:
                burst.view(self._parameters, spec).copy_(value)
        return {"op": "wrote", "missing": missing}

    def run(
        self, calls: list[dict[str, Any]], hold: bool, each: bool, kept: list[str] | None, lead_ns: int
    ) -> Answer:  # fmt: skip
        """One burst: K calls, then delivery of every result; the device's clock has so much lead, see `Backend`.

        With `hold` the results stay alive until another burst without it, as a caller's would. With `each` a result
        is delivered before the next call, for rules under which it dies there. Dropped results are spoiled but for the
        paths `kept`; none are for None.
        """
        delivery = burst.Delivery(self._outputs, self._inputs, self._model, self._device.device.type)
        inputs, slots = burst.read_calls(self._inputs, calls), [call["slots"] for call in calls]
        if each:
            return self._run_each(inputs, slots, delivery, lead_ns)
        earlier, answers = list(self._earlier), []
        results, stamps, launch_ns = self._device.run_burst(
            self._model, inputs, lambda result: answers.append(delivery.deliver(result, slots[0], earlier)), lead_ns
        )
        pending = list(zip(results, slots, strict=True))[len(answers) :]
        answers += [delivery.deliver(result, place, earlier) for result, place in pending]
        if not hold and kept is not None:
            delivery.spoil(earlier, kept, self._device.spoil)
        self._device.settle()  # while the results live
        self._earlier = earlier if hold else []
        self._held = [*self._held, *zip(results, slots, strict=True)] if hold else []
        return {"op": "ran", "stamps": stamps, "launch_ns": launch_ns, "results": answers}

    def _run_each(
        self, calls: list[list[Any]], slots: list[list[list[int]]], delivery: burst.Delivery, lead_ns: int
    ) -> Answer:  # fmt: skip
        answers, stamps, launch_ns = [], [0], 0
        for inputs, place in zip(calls, slots, strict=True):
            (result,), (begin, end), launch_ns = self._device.run_burst(self._model, [inputs], lead_ns=lead_ns)
            stamps.append(stamps[-1] + end - begin)
            answers.append(delivery.deliver(result, place, []))
            self._device.settle()
        return {"op": "ran", "stamps": stamps, "launch_ns": launch_ns, "results": answers}

    def redeliver(self) -> Answer:
        """Delivers the results that are still held once more: they may have changed since."""
        delivery = burst.Delivery(self._outputs, device=self._device.device.type)
        for result, slots in self._held:
            delivery.deliver(result, slots, [])
        self._device.settle()
        return {"op": "redelivered"}

    def trace(self, calls: list[dict[str, Any]]) -> Answer:
        """Runs the calls one by one under a tracer; results are dropped."""
        for inputs in burst.read_calls(self._inputs, calls):
            with torch.no_grad():
                self._trace.run(self._model, inputs)
        return {"op": "traced", **self._trace.report()}

    def profile(self, calls: list[dict[str, Any]], rounds: int) -> Answer:
        """Where the time of the calls goes; the last request of a worker."""
        inputs = burst.read_calls(self._inputs, calls)
        return {"op": "profiled", **profiling.run(self._model, inputs, rounds, self._device.device)}

    def inspect(self) -> Answer:
        """What the candidate changed in its process, and the compilers that it used."""
        replaced, settings = tripwire.replaced(self._functions), tripwire.changed_settings(self._settings)
        return {
            "op": "inspected", "replaced": replaced, "settings": settings, "compilers": self._compilers.used(),
            "programs": list(shim.programs()),
        }  # fmt: skip

    def seal(self, filter: bool) -> Answer:
        """No new programs and processes from here on."""
        if filter:
            confine.seal()
        return {"op": "sealed"}


OPERATIONS = (
    "open", "load", "construct", "map", "parameters", "state", "run", "redeliver", "trace", "inspect", "profile",
    "seal",
)  # fmt: skip


def _path() -> str:
    return os.path.join(os.getcwd(), _FILE)


def _quieten(model: torch.nn.Module) -> None:
    """Dropout off, as in the reference where it is what makes it random."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.eval()


def _entry(value: torch.Tensor) -> dict[str, Any]:
    spec = native.spec_of(value)
    return {"dtype": spec.dtype, "shape": list(spec.shape)}


def work(channel: socket, runtime: str) -> None:
    """Serves the judge's requests until it closes the channel, on the device that `runtime` names."""
    shim.install(_asking(channel))
    device = backend.create(runtime)
    worker = Worker(device)
    handlers: dict[str, Callable[..., Answer]] = {name: getattr(worker, name) for name in OPERATIONS}
    send, receive = wire.send, wire.receive_trusted
    forget_project()
    while True:
        try:
            request, descriptors = receive(channel)
        except wire.WireClosed:
            return
        operation = str(request["op"])
        try:
            answer = handlers[request.pop("op")](**request, **({"fds": descriptors} if descriptors else {}))
            device.settle()
        except BaseException as error:  # noqa: BLE001  the candidate may raise anything at all
            answer = failure(operation, error)
        for number in descriptors if operation != "map" else ():
            os.close(number)
        try:
            send(channel, answer)
        except ValueError:
            send(
                channel,
                {"op": "failed", "stage": operation, "kind": "Answer", "text": "answer too large", "line": 0},
            )


def _asking(channel: socket) -> shim.Ask:
    """How the shim asks for a build in the middle of a request."""
    send, receive = wire.send, wire.receive_trusted

    def ask(message: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        try:
            send(channel, message)
        except ValueError as error:
            raise shim.CompileError(f"the sources are too large for a build: {error}") from error
        answer, descriptors = receive(channel)
        return answer, descriptors[0] if descriptors else None

    return ask


def forget_project() -> None:
    """Takes the project, and the folder that the zygote was started in, off the import path and the module table."""
    own = {"", "/", _ROOT}
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) not in own and entry not in own]
    os.environ.pop("PYTHONPATH", None)
    for name in project_modules():
        _kept.append(sys.modules.pop(name))  # taking them apart would take milliseconds
    sys.modules["__main__"] = types.ModuleType("__main__")


@cache
def project_modules() -> tuple[str, ...]:
    """Names of the project's modules; read once, by the zygote, since a look at every name takes milliseconds."""
    return tuple(name for name in sys.modules if name.partition(".")[0] in _FORGOTTEN)


def failure(stage: str, error: BaseException, file: str = _FILE) -> dict[str, Any]:
    """What went wrong in candidate code, or that of another file, in plain values."""
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if os.path.basename(trace.tb_frame.f_code.co_filename) == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        line = error.lineno or line
    try:
        text = str(error)[:_TEXT_LIMIT]
    except BaseException:  # noqa: BLE001  __str__ is candidate code as well
        text = ""
    kind, said = type(error).__name__[:80], shim.explain(error, loading=stage in ("load", "construct"))
    if said:
        kind, text = shim.CompileError.__name__, said[:_TEXT_LIMIT]
    text = text.encode("utf-8", "replace").decode()
    return {"op": "failed", "stage": stage, "kind": kind, "text": text, "line": line}
