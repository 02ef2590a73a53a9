"""The zygote: a process that has imported torch once and forks workers and reference servers in milliseconds.

    python -m evaluator.worker.zygote FD        # FD: the control end of a SOCK_SEQPACKET pair to the judge

Invariants: it never touches an accelerator, holds no secret, runs no candidate code, and has one thread at each fork
(asserted: a fork that finds more is refused). It ends when the judge's end of the control socket closes. Children get
their parent-death signal set again after each fork, with a check that the parent still lives.

A worker is the grandchild: the intermediary between enters the namespaces (a pid namespace begins with the next child),
waits for the worker and tells the judge its process id and how it ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
from typing import Any

from evaluator.worker import allocator, phases, sandbox, syscalls, wire

EXTENSIONS = "torch.utils.cpp_extension"
"""Torch's builder of extensions."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    allocator.loaded()
    with contextlib.suppress(wire.WireClosed):  # the judge is gone
        _serve(control)


def _serve(control: socket.socket) -> None:
    """Imports what workers need, then forks them until the judge's end closes."""
    settings, _ = wire.receive_trusted(control)
    for ignored in (signal.SIGINT, signal.SIGTERM):  # it ends, and cleans up, when the judge's end closes
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps; the judge learns of deaths from its own sockets
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # also workers whose intermediary was killed before them
    _import_everything(settings)
    gc.collect()
    gc.freeze()
    wire.send(control, {"op": "ready", "pid": os.getpid()})
    while True:
        try:
            request, descriptors = wire.receive_trusted(control)
        except wire.WireClosed:
            if settings["scratch"]:
                shutil.rmtree(settings["scratch"], ignore_errors=True)
            return
        try:
            pid = _fork(control, request, descriptors, int(settings.get("threads", 1)))
            wire.send(control, {"op": "forked", "pid": pid})
        except (OSError, RuntimeError) as error:
            wire.send(control, {"op": "failed", "text": str(error)})
        finally:
            for number in descriptors:
                os.close(number)


def _import_everything(settings: dict[str, Any]) -> None:
    import torch
    import torch.nn.functional
    import torch.utils._pytree

    _import_extensions()
    from evaluator.reference import server  # noqa: F401
    from evaluator.worker import backend_cuda, confine, tripwire  # noqa: F401

    for name in settings.get("modules", ()):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    tripwire.functions()
    allocator.release()
    sandbox.interpreter_trees()
    confine.prepare()
    phases.project_modules()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    _touch_kernels()


def _import_extensions() -> None:
    """Imports torch's extension builder with every device hidden.

    Its module asks for the devices, which starts the CUDA driver with a thread of its own; a process that did may not
    fork workers that use CUDA (measured: torch 2.11, driver 580).
    """
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        importlib.import_module(EXTENSIONS)
    finally:
        if visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        torch.cuda._cached_device_count = None


def keep_freed_memory() -> None:
    """Makes the C allocator keep what was freed, so that neither arm pays page faults for memory that it had before.

    Inherited by both arms: without it their heaps, which have different histories, would decide the ratio of tasks with
    large results.
    """
    libc = ctypes.CDLL(None)
    for option, value in ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, (1 << 31) - 1)):
        libc.mallopt(ctypes.c_int(option), ctypes.c_int(value))


def _touch_kernels() -> None:
    """First use of the usual libraries here, so that no worker pays for their initialisation."""
    import torch

    with torch.no_grad():
        x = torch.randn(32, 32)
        torch.nn.functional.gelu(torch.nn.functional.linear(x, x, x[0])).softmax(-1).sum()
        torch.nn.functional.conv2d(x.view(1, 4, 16, 16), x.view(-1)[:144].view(4, 4, 3, 3), padding=1)


def _fork(control: socket.socket, request: dict[str, Any], descriptors: list[int], threads: int) -> int:
    """Forks a child whose torch uses so many threads; they begin with its first work on several."""
    found = len(os.listdir("/proc/self/task"))
    if found != 1:
        raise RuntimeError(f"the zygote has {found} threads and must not fork")
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            os._exit(71)
        control.close()
        os.setsid()
        for restored in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(restored, signal.SIG_DFL)
        if threads != 1:
            sys.modules["torch"].set_num_threads(threads)
        if request["role"] == "worker":
            code = _intermediary(request, *descriptors)
        else:
            from evaluator.reference import server

            server.serve(socket.socket(fileno=descriptors[0]), request)
            code = 0
    finally:
        os._exit(code)


def _intermediary(request: dict[str, Any], channel: int, status: int) -> int:
    """Forks the worker, reports its id, waits for it and reports how it ended.

    Orphans of the worker become children of this process, so that the judge finds them where no namespace keeps them.
    """
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    plan = sandbox.SandboxPlan(**{key: _tupled(value) for key, value in request["sandbox"].items()})
    report = socket.socket(fileno=status)
    life_read, life_write = os.pipe()
    try:
        entered = sandbox.enter_namespaces(plan.layers)
        worker = os.fork()
    except OSError as error:
        wire.send(report, {"op": "failed", "text": str(error)})
        return 1
    if worker == 0:
        code = 70
        try:
            os.close(life_write)
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            if _hung_up(life_read):
                os._exit(71)
            code = _worker(plan, entered, channel, str(request.get("runtime", "")))
        finally:
            os._exit(code)
    wire.send(report, {"op": "born", "pid": worker})
    syscalls.close_descriptors({report.fileno(), life_write})
    _, ended = os.waitpid(worker, 0)
    wire.send(report, {"op": "ended", "code": os.waitstatus_to_exitcode(ended)})
    return 0


def _worker(plan: sandbox.SandboxPlan, entered: list[str], channel: int, runtime: str) -> int:
    end = socket.socket(fileno=channel)
    try:
        layers = sandbox.isolate(plan, entered, {channel})
    except OSError as error:
        wire.send(end, {"op": "failed", "stage": "sandbox", "text": str(error)})
        return 1
    wire.send(end, {"op": "ready", "layers": layers})
    phases.work(end, runtime)
    return 0


def _hung_up(read_end: int) -> bool:
    poller = select.poll()
    poller.register(read_end, select.POLLHUP)
    return bool(poller.poll(0))


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
