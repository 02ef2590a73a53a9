"""The worker's side: `torch.utils.cpp_extension.load_inline` and `load`, served by the judge's compile pool.

`install` replaces both functions before candidate code runs, so that the first call anywhere (module, `__init__`,
`forward`) sends sources and flags over the worker's channel, waits, and imports the finished library from a private
read-only copy; there is no ninja and no compiler in this process. A candidate that runs a compiler itself does so in
its sandbox: see `commands`.

Invariants: standard library and torch only, everything is bound at import, since the project is no longer importable
when this runs; what goes out is plain text of the schema in `request`; nothing here is trusted by the judge.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

from evaluator.compile import commands

Ask = Callable[[dict[str, Any]], tuple[dict[str, Any], int | None]]
"""Sends a `compile` message and waits: the answer, and the library's descriptor, which the callee closes."""

_HEADERS = (".h", ".hh", ".hpp", ".hxx", ".cuh", ".inl", ".inc")
_MAX_HEADERS = 256


class CompileError(RuntimeError):
    """A library could not be built; the text is the compiler's."""


class _State:
    """What one worker has built and run so far."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.modules: dict[str, Any] = {}
        self.names: dict[str, int] = {}
        self.failed_text = ""
        self.lock = threading.Lock()


_state: _State | None = None


def install(ask: Ask) -> None:
    """Replaces torch's just-in-time builders and lets command lines run without a shell; once per worker."""
    global _state
    from torch.utils import cpp_extension

    _state = _State(ask)
    cpp_extension.load_inline = _replacement(cpp_extension.load_inline, _inline_request)
    cpp_extension.load = _replacement(cpp_extension.load, _files_request)
    commands.install()


def programs() -> tuple[str, ...]:
    """Compilers that the candidate ran itself with success, by name."""
    return commands.succeeded()


def explain(error: BaseException, *, loading: bool = True) -> str:
    """What a compiler said, when the candidate failed because a build of its own did; empty otherwise.

    While it loads, any failed build counts as the cause: a library that was never written fails as a missing file.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CompileError):
            return str(seen)
        said = commands.said_by(seen)
        if said:
            return said
        seen = seen.__cause__ or seen.__context__
    if not loading:
        return ""
    return commands.failures() or (_state.failed_text if _state is not None else "")


def _replacement(original: Callable[..., Any], prepare: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def build(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments.get("is_standalone"):
            raise CompileError("a stand-alone program cannot be built here: leave is_standalone out")
        if given.arguments.get("with_sycl") or given.arguments.get("sycl_sources"):
            raise CompileError("SYCL sources cannot be built here")
        return _load(prepare(**given.arguments), bool(given.arguments.get("is_python_module", True)))

    build.__name__, build.__doc__ = original.__name__, original.__doc__
    build.__signature__ = signature  # type: ignore[attr-defined]
    return build


def _inline_request(
    name: str, cpp_sources: Any, cuda_sources: Any = None, functions: Any = None,
    with_pytorch_error_handling: bool = True, no_implicit_headers: bool = False, **rest: Any,
) -> dict[str, Any]:  # fmt: skip
    host = [*_listed(cpp_sources), *_bindings(functions, with_pytorch_error_handling)]
    sources = [{"name": "main.cpp", "text": "\n".join(host)}]
    cuda = _listed(cuda_sources)
    if cuda:
        sources.append({"name": "cuda.cu", "text": "\n".join(cuda)})
    return {**_common(name, sources, rest), "implicit_headers": not no_implicit_headers}


def _files_request(name: str, sources: Any, **rest: Any) -> dict[str, Any]:
    paths = [os.path.abspath(path) for path in _listed(sources)]
    files = [{"name": os.path.basename(path), "text": _source_text(path)} for path in paths]
    message = {**_common(name, files, rest), "implicit_headers": False}
    taken = {file["name"] for file in [*files, *message["headers"]]}
    near = [header for folder in dict.fromkeys(map(os.path.dirname, paths)) for header in _headers(folder)]
    message["headers"] += [header for header in near if header["name"] not in taken]
    return message


def _common(name: str, sources: list[dict[str, str]], rest: dict[str, Any]) -> dict[str, Any]:
    outside, headers = [], []
    for folder in map(os.path.abspath, _listed(rest.get("extra_include_paths"))):
        if _private(folder):
            headers += _headers(folder)
        else:
            outside.append(folder)
    return {
        "op": "compile", "name": re.sub(r"\W", "_", str(name))[:80] or "extension", "sources": sources,
        "headers": headers, "torch": True, "cuda": bool(rest.get("with_cuda")), "include_paths": outside,
        "cflags": _listed(rest.get("extra_cflags")), "cuda_cflags": _listed(rest.get("extra_cuda_cflags")),
        "ldflags": _listed(rest.get("extra_ldflags")),
    }  # fmt: skip


def _bindings(functions: Any, handled: bool) -> list[str]:
    if functions is None:
        return []
    if not isinstance(functions, dict):
        functions = {name: name for name in _listed(functions)}
    lines = ["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {"]
    for name, text in functions.items():
        callee = f"torch::wrap_pybind_function({name})" if handled else name
        lines.append(f'm.def("{name}", {callee}, {json.dumps(str(text))});')
    return [*lines, "}"]


def _load(message: dict[str, Any], is_python_module: bool) -> Any:
    if _state is None:
        raise CompileError("no compile pool serves this process")
    identity = json.dumps([message, is_python_module], sort_keys=True)
    with _state.lock:
        if identity not in _state.modules:
            _state.modules[identity] = _built(_state, message, is_python_module)
        return _state.modules[identity]


def _built(state: _State, message: dict[str, Any], is_python_module: bool) -> Any:
    base = message["name"]
    count = state.names.get(base, 0)
    state.names[base] = count + 1
    name = base if count == 0 else f"{base}_v{count}"
    answer, descriptor = state.ask({**message, "name": name})
    if descriptor is None or not answer.get("ok"):
        state.failed_text = str(answer.get("text", ""))
        raise CompileError(f"Error building extension '{base}': {state.failed_text}")
    path = _private_copy(descriptor, name)
    return _imported(name, path) if is_python_module else _operators(path)


def _private_copy(descriptor: int, name: str) -> str:
    folder = os.path.join(os.environ.get("TMPDIR", os.getcwd()), "extensions", name)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, f"{name}.so")
    try:
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)
    with open(path, "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), 0o444)
    return path


def _imported(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CompileError(f"the library of {name} is no Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


def _operators(path: str) -> str:
    import torch

    torch.ops.load_library(path)
    return path


def _listed(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str | os.PathLike):
        return [os.fspath(value)]
    return [os.fspath(item) for item in value]


def _source_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        raise CompileError(f"cannot read the source {os.path.basename(path)}: {error.strerror}") from error


def _private(folder: str) -> bool:
    roots = {
        os.path.realpath(root)
        for root in (os.getcwd(), os.environ.get("TMPDIR", ""), os.environ.get("HOME", ""))
        if root
    }
    real = os.path.realpath(folder)
    return any(real == root or real.startswith(root + os.sep) for root in roots)


def _headers(folder: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for parent, _, names in os.walk(folder):
        for name in sorted(names):
            if name.endswith(_HEADERS) and len(found) < _MAX_HEADERS:
                path = os.path.join(parent, name)
                found.append({"name": os.path.relpath(path, folder), "text": _source_text(path)})
    return found
