"""The judge's side: requests in, libraries out, quick builds never behind slow ones.

Invariants: equal plans that are wanted at the same time are built once; a build that fails for want of a machine
(no space, no isolation) is never called the candidate's error; `close` ends every build; a worker only ever gets a
sealed copy of a library, never a path or a descriptor of the cache.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from evaluator.compile import diagnostics
from evaluator.compile.cache import CacheFull, LibraryCache, default_root
from evaluator.compile.config import CompileConfig
from evaluator.compile.headers import HeaderStore, header_limits, header_plan
from evaluator.compile.job import Limits
from evaluator.compile.request import BadRequest, CompileRequest, CompileResult, FailureKind
from evaluator.compile.routes import BuildPlan, RefusedRequest, plan_build
from evaluator.compile.toolchain import Toolchain, discover
from evaluator.worker.sandbox import import_path
from tasks.lifeline import Owned, spawn

logger = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_KINDS: dict[str, tuple[FailureKind, str]] = {
    "failed": ("compile_error", "the compiler refused the source"),
    "timeout": ("timeout", "the build took too long"),
    "memory": ("resource_abuse", "the build used too much memory"),
    "output": ("resource_abuse", "the build wrote too much"),
    "sandbox": ("sandbox_unavailable", "a build could not be isolated"),
    "died": ("evaluator_lost", "the build process died"),
}


class CompilePool:
    """Builds libraries for the workers of one machine; a context manager; its methods may be called by any thread.

    `arch` is the CUDA architecture where the configuration names none, `cores` those that compilers may run on.
    """

    def __init__(
        self, config: CompileConfig | None = None, *, tools: Toolchain | None = None, arch: str = "",
        allow_unsandboxed: bool = False, cores: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.config = config or CompileConfig()
        self.tools = tools or discover()
        self._arch = self.config.arch or arch
        root = Path(self.config.cache_dir).expanduser() if self.config.cache_dir else default_root()
        self.cache = LibraryCache(root, self.config.cache_mib << 20)
        self._headers = HeaderStore(
            root / "headers", self.config.precompiled_header_mib, self.config.precompile_after
        )  # fmt: skip
        self._limits = Limits(
            timeout_s=self.config.timeout_s, memory_mib=self.config.memory_mib, output_mib=self.config.output_mib,
            allow_unsandboxed=allow_unsandboxed, fallback_scratch=str(root / "partial"), cores=cores,
        )  # fmt: skip
        self._lanes = {
            "quick": ThreadPoolExecutor(self.config.quick_jobs, "kontrast-compile-quick"),
            "slow": ThreadPoolExecutor(self.config.slow_jobs, "kontrast-compile-slow"),
        }
        self._builder = Builder()
        self._wanted: dict[str, Future[CompileResult]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def compile(self, request: CompileRequest) -> CompileResult:
        """Builds a request or finds it built. Never raises for what the request holds."""
        return self.submit(request).result()

    def submit(self, request: CompileRequest) -> Future[CompileResult]:
        """The same without waiting."""
        try:
            plan = plan_build(request, self.tools, arch=self._arch)
        except RefusedRequest as error:
            return _done(CompileResult(name=request.name, kind="compile_error", message=str(error), text=str(error)))
        key = plan.key(self.tools.fingerprint)
        found = self.cache.find(key)
        if found is not None:
            return _done(CompileResult(name=request.name, library=found, key=key, cached=True))
        header = self._headers.key(request, self.tools)
        if header and self._headers.due(header):
            self._lanes["slow"].submit(self._build_header, header, header_plan(request, self.tools, plan))
        with self._lock:
            future = self._wanted.get(key)
            if future is None:
                future = self._lanes[plan.lane].submit(self._build, request, plan, key, header, time.monotonic())
                self._wanted[key] = future
                future.add_done_callback(lambda _: self._wanted.pop(key, None))
        return future

    def serve(self, message: dict[str, Any]) -> tuple[dict[str, Any], int | None, CompileResult]:
        """A worker's message: the answer, a sealed descriptor of the library (the caller's to close), and the result.

        Raises BadRequest for a message off the schema, which only a tampered worker sends.
        """
        result = self.compile(CompileRequest.from_wire(message))
        descriptor = sealed_copy(result.library) if result.library is not None else None
        return result.to_answer(), descriptor, result

    def close(self) -> None:
        """Ends all builds and the server. Safe to call twice."""
        self._builder.close()
        for lane in self._lanes.values():
            lane.shutdown(wait=True, cancel_futures=True)

    def _build_header(self, key: str, plan: BuildPlan) -> None:
        partial, descriptor = self._headers.partial()
        try:
            report = self._builder.build(plan, header_limits(self._limits), descriptor)
            if report["state"] == "built":
                self._headers.publish(key, partial)
            else:
                logger.info("no precompiled header: %s", str(report.get("text", ""))[-300:])
        finally:
            os.close(descriptor)
            partial.unlink(missing_ok=True)

    def _build(
        self, request: CompileRequest, plan: BuildPlan, key: str, header: str, asked: float
    ) -> CompileResult:  # fmt: skip
        name = request.name
        ready = self._headers.find(header) if header else ""
        if ready:
            plan = plan_build(request, self.tools, arch=self._arch, header=ready)
        begin = time.monotonic()
        library = os.memfd_create("library", os.MFD_CLOEXEC)
        report = self._builder.build(plan, self._limits, library)
        try:
            times: dict[str, Any] = {"seconds": time.monotonic() - begin, "waited_s": begin - asked}
            layers = tuple(str(layer) for layer in report.get("layers", ()))
            if report["state"] == "built":
                size = os.fstat(library).st_size
                try:
                    path = self.cache.publish(key, os.pread(library, size, 0))
                except CacheFull as error:
                    return CompileResult(name=name, kind="no_space", message=str(error), **times)
                return CompileResult(name=name, library=path, key=key, isolation=layers, **times)
        finally:
            os.close(library)
        return _failure(name, report, key=key, isolation=layers, **times)


def _failure(name: str, report: dict[str, Any], **rest: Any) -> CompileResult:
    kind, sentence = _KINDS.get(report["state"], _KINDS["died"])
    text = str(report.get("text", ""))
    if kind != "compile_error":
        return CompileResult(name=name, kind=kind, message=text or sentence, text=text[:500], **rest)
    errors = diagnostics.first_errors(text)
    message = sentence
    if errors:
        place = f"{errors[0].file}:{errors[0].line}: " if errors[0].file else ""
        message = f"{sentence}: {place}{errors[0].message}"
    return CompileResult(name=name, kind=kind, message=message, errors=errors, text=diagnostics.cut(text), **rest)


class Builder:
    """The build server's handle: starts it when needed, one report per build, whatever dies."""

    def __init__(self) -> None:
        self._owned: Owned | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = False

    def build(self, plan: BuildPlan, limits: Limits, library: int) -> dict[str, Any]:
        """Runs a plan, writing its output to the descriptor `library`; returns the report."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        text = os.memfd_create("plan", os.MFD_CLOEXEC)
        try:
            _write(text, json.dumps(plan.to_wire()).encode())
            with self._lock:
                if self._closed:
                    return {"state": "died", "text": "the compile pool is closed"}
                packet = json.dumps(asdict(limits)).encode()
                socket.send_fds(self._server(), [packet], [text, library, theirs.fileno()])
            theirs.close()
            return _report(ours, limits.timeout_s)
        except OSError as error:
            logger.warning("the build server was lost: %s", error)
            self.close(for_good=False)
            return {"state": "died", "text": f"the build server was lost: {error}"}
        finally:
            os.close(text)
            ours.close()
            theirs.close()

    def _server(self) -> socket.socket:
        if self._control is None or self._owned is None or self._owned.poll() is not None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            environment = {name: os.environ[name] for name in ("PATH", "LANG", "VIRTUAL_ENV") if name in os.environ}
            self._owned = spawn(
                [sys.executable, "-m", "evaluator.compile.server", str(theirs.fileno())],
                env={**environment, "PYTHONPATH": import_path(), "PYTHONDONTWRITEBYTECODE": "1"}, cwd="/",
                pass_fds=[theirs.fileno()], stderr=None,
            )  # fmt: skip
            theirs.close()
            self._control = ours
        return self._control

    def close(self, for_good: bool = True) -> None:
        """Ends the server and every build."""
        with self._lock:
            self._closed = self._closed or for_good
            if self._control is not None:
                self._control.close()
                self._control = None
            if self._owned is not None:
                self._owned.stop()
                self._owned = None


def _report(end: socket.socket, timeout_s: float) -> dict[str, Any]:
    end.settimeout(timeout_s + 30.0)  # the watcher keeps the deadline; this only guards against its loss
    data = b""
    while chunk := end.recv(1 << 16):
        data += chunk
    report = json.loads(data) if data else {"state": "died", "text": "the build process died"}
    return report if isinstance(report, dict) and "state" in report else {"state": "died", "text": "no report"}


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _done(result: CompileResult) -> Future[CompileResult]:
    future: Future[CompileResult] = Future()
    future.set_result(result)
    return future


def sealed_copy(path: Path) -> int:
    """A descriptor of a copy that nobody can change any more."""
    descriptor = os.memfd_create("library", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    _write(descriptor, path.read_bytes())
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


__all__ = ["BadRequest", "Builder", "CompilePool", "sealed_copy"]
