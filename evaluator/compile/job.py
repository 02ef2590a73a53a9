"""One build in its own isolation: enter the namespaces, fork, run the compilers, hand the library back, die.

Two processes: the *watcher* keeps deadline, memory and its owner's life; the *builder* (process 1 of its own process
namespace where there are any) is confined like a candidate's worker and runs the compilers.

Invariants: the builder runs only the plan's programs, sees no network and an empty private folder; whatever happens the
watcher sends exactly one report, and nothing of the builder is left when it has; a closed report socket ends the build.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import select
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, replace
from typing import Any

from evaluator.worker import sandbox, syscalls

_WATCH_S = 0.05
_TEXT_BYTES = 1 << 20
_FAULT = "sandbox"


@dataclass(frozen=True)
class Limits:
    """What one build may use."""

    timeout_s: float
    memory_mib: int
    output_mib: int
    allow_unsandboxed: bool = False
    layers: tuple[str, ...] = sandbox.LAYERS
    fallback_scratch: str = ""
    cores: tuple[int, ...] = ()
    """Where compilers run; empty for all. On CPU they keep off the cores that timings own."""


def watch(plan: dict[str, Any], limits: Limits, library: int, report: socket.socket) -> None:
    """Runs one build and sends its report: `{"state", "text", "layers"}`.

    `state` is `built`, `failed` (a compiler said no), `timeout`, `memory`, `output`, `sandbox` or `died`.
    """
    begin = time.monotonic()
    if limits.fallback_scratch:
        own = os.path.join(limits.fallback_scratch, secrets.token_hex(8))
        limits = replace(limits, fallback_scratch=own)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)  # the builder mounts one of its own over it
    if limits.cores:
        os.sched_setaffinity(0, limits.cores)
    entered = sandbox.enter_namespaces(limits.layers)
    read_end, write_end = os.pipe()
    builder = os.fork()
    if builder == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            os.close(read_end)
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
            report.close()
            code = _build(plan, limits, entered, library, write_end)
        finally:
            os._exit(code)
    os.close(write_end)
    outcome = _await(builder, read_end, report, begin, limits, proc)
    _end(builder)
    if limits.fallback_scratch:
        shutil.rmtree(limits.fallback_scratch, ignore_errors=True)
    with contextlib.suppress(OSError):
        report.sendall(json.dumps(outcome).encode())


def _await(
    builder: int, pipe: int, owner: socket.socket, begin: float, limits: Limits, proc: int
) -> dict[str, Any]:  # fmt: skip
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    poller.register(owner, select.POLLHUP)
    data = b""
    while True:
        for number, event in poller.poll(_WATCH_S * 1000):
            if number != pipe:
                return {"state": "died", "text": "nobody waits for this build any more"}
            chunk = os.read(pipe, 1 << 16) if event & select.POLLIN else b""
            data += chunk
            if not chunk or len(data) > 2 * _TEXT_BYTES:
                return _parsed(data)
        if time.monotonic() - begin > limits.timeout_s:
            return {"state": "timeout", "text": f"the build took longer than {limits.timeout_s:g} s"}
        used = tree_rss_bytes(builder, proc)
        if used > limits.memory_mib << 20:
            return {"state": "memory", "text": f"the build used {used >> 20} MiB, over {limits.memory_mib} MiB"}


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        outcome = json.loads(data)
    except ValueError:
        return {"state": "died", "text": "the build ended without a report"}
    return outcome if isinstance(outcome, dict) else {"state": "died", "text": "the build's report is none"}


def _end(builder: int) -> None:
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(builder, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(builder, 0)


def tree_rss_bytes(root: int, proc: int) -> int:
    """Resident memory of a process and all below it; a page shared by several counts for each.

    `proc` is a descriptor of the /proc in which `root` is the process's number.
    """
    total, todo = 0, [root]
    page = os.sysconf("SC_PAGESIZE")
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(_read_at(proc, f"{pid}/statm").split()[1]) * page
            todo += [int(word) for word in _read_at(proc, f"{pid}/task/{pid}/children").split()]
    return total


def _read_at(folder: int, path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=folder)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)


def _build(plan: dict[str, Any], limits: Limits, entered: list[str], library: int, pipe: int) -> int:
    try:
        layers = _isolate(plan, limits, entered, library, pipe)
    except OSError as error:
        _report(pipe, {"state": _FAULT, "text": f"no isolation for a build: {error}"})
        return 1
    if not layers and not limits.allow_unsandboxed:
        _report(pipe, {"state": _FAULT, "text": "this machine allows no isolation layer, so nothing is built"})
        return 1
    try:
        outcome = _run(plan, library)
    except OSError as error:
        outcome = {"state": "failed", "text": f"{error.filename or 'the build'}: {error.strerror}"}
    _report(pipe, {**outcome, "layers": layers})
    return 0


def _isolate(plan: dict[str, Any], limits: Limits, entered: list[str], library: int, pipe: int) -> list[str]:
    sandbox_plan = sandbox.SandboxPlan(
        read=tuple(plan["read"]), execute=tuple(plan["execute"]), scratch_mib=2 * limits.output_mib + 256,
        layers=limits.layers, fallback_scratch=limits.fallback_scratch,
    )  # fmt: skip
    layers = sandbox.isolate(sandbox_plan, entered, {library, pipe})
    os.environ.clear()
    here = os.getcwd()
    os.environ.update(PATH=plan["search_path"], TMPDIR=here, HOME=here, LC_ALL="C", NVCC_APPEND_FLAGS="")
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.output_mib << 20, limits.output_mib << 20))
    cpu_s = int(limits.timeout_s) + 10  # for machines without a process namespace, where a grandchild could stay
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    return layers


def _run(plan: dict[str, Any], library: int) -> dict[str, Any]:
    for name, text in plan["files"]:
        if "/" in name:
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "w") as file:
            file.write(text)
    running = [_start(argv, f"{index}.log") for index, argv in enumerate(plan["objects"])]
    codes = [process.wait() for process in running]
    text = "".join(_said(f"{index}.log") for index in range(len(codes)))
    if not any(codes) and plan["link"]:
        codes.append(_start(plan["link"], "link.log").wait())
        text += _said("link.log")
    if any(codes):
        full = "File size limit exceeded" in text or "No space left on device" in text or -signal.SIGXFSZ in codes
        return {"state": "output" if full else "failed", "text": text or f"the compiler ended with code {max(codes)}"}
    with open(plan["output"], "rb") as file:
        os.truncate(library, 0)
        offset, size = 0, os.fstat(file.fileno()).st_size
        while offset < size:
            offset += os.sendfile(library, file.fileno(), None, size - offset)
    return {"state": "built", "text": text}


def _start(argv: list[str], log: str) -> subprocess.Popen[bytes]:
    with open(log, "wb") as file:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)


def _said(log: str) -> str:
    with open(log, "rb") as file:
        return file.read(_TEXT_BYTES).decode("utf-8", "replace")


def _report(pipe: int, outcome: dict[str, Any]) -> None:
    data = json.dumps({**outcome, "text": str(outcome["text"])[:_TEXT_BYTES]}).encode()
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]
