"""From a request to the commands that build it, without ninja: pure, so that a plan is also what names an artefact.

Invariants: sources are the candidate's own text, line for line, so that a compiler's line numbers are the candidate's
(implicit headers come by `-include`); flags that would write elsewhere, run a program or stop half way are refused; the
CUDA architecture comes from the configuration or the request's flags, never from a visible GPU.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, dataclass
from typing import Any, Literal

from evaluator.compile.request import CompileRequest
from evaluator.compile.toolchain import Toolchain
from tasks.records.base import digest, stable_json

Lane = Literal["quick", "slow"]

_ARCHES = {
    "T4": "7.5", "A100": "8.0", "A10": "8.6", "A10G": "8.6", "A40": "8.6", "L4": "8.9", "L40": "8.9", "L40S": "8.9",
    "H100": "9.0a", "H200": "9.0a", "GH200": "9.0a", "B200": "10.0a", "GB200": "10.0a",
}  # fmt: skip
"""CUDA architecture of a device type; what is missing here is set by `compile.arch`."""

_NVCC_DEFAULTS = (
    "-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__", "--expt-relaxed-constexpr",
)  # fmt: skip
"""What torch's own builder gives to nvcc."""

_REFUSED_EXACT = frozenset((
    "-o", "-c", "-E", "-S", "-M", "-MM", "-MF", "-MD", "-MMD", "-wrapper", "-run", "--run", "-", "-x", "-keep",
    "--keep", "-ptx", "--ptx", "-cubin", "--cubin", "-fatbin", "--fatbin", "-dryrun", "--dryrun", "-time",
    "-fsyntax-only",
))  # fmt: skip
_REFUSED_PREFIXES = (
    "@", "-B", "-fplugin", "-specs", "--specs", "-save-temps", "--save-temps", "-dump", "-ccbin", "--compiler-bindir",
    "-odir", "--output-directory", "-fdump", "-o=", "--output-file", "-keep-dir", "--keep-dir", "-fuse-ld", "-aux-info",
)  # fmt: skip
COMPILED = {".c": "c", ".cc": "cxx", ".cpp": "cxx", ".cxx": "cxx", ".cu": "cuda"}


class RefusedRequest(ValueError):
    """A request that cannot be built here; the text is for the candidate."""


@dataclass(frozen=True)
class BuildPlan:
    """What a job does: write the files, run `objects` side by side, then `link` if any, and give `output` back."""

    files: tuple[tuple[str, str], ...]
    objects: tuple[tuple[str, ...], ...]
    link: tuple[str, ...]
    output: str
    search_path: str
    execute: tuple[str, ...]
    read: tuple[str, ...]
    lane: Lane

    def to_wire(self) -> dict[str, Any]:
        """Plain values for the job."""
        return asdict(self)

    def key(self, fingerprint: str) -> str:
        """Names the artefact: 64 hex digits over sources, flags, architecture and toolchain."""
        return digest("library", fingerprint, stable_json([self.files, self.objects, self.link, self.output]))


def arch_of(device_type: str) -> str:
    """The architecture of a device type; empty (nvcc's default, compiled at first use) for an unknown one."""
    return _ARCHES.get(device_type, "")


def plan_build(request: CompileRequest, tools: Toolchain, *, arch: str = "", header: str = "") -> BuildPlan:
    """The commands for a request.

    `arch` is a CUDA architecture such as `9.0`; `header` a folder with a precompiled `torch/extension.h` that fits
    (see `header_flags`). Raises RefusedRequest with one sentence.
    """
    kinds = {source.name: _kind(source.name) for source in request.sources}
    _require_tools(set(kinds.values()), request, tools)
    includes = _includes(request, tools)
    commands = []
    objects: list[str] = []
    for name, kind in kinds.items():
        target = f"{len(objects)}.o"
        flags = _cuda_flags(request, tools, arch) if kind == "cuda" else _host_flags(request, kind, tools)
        before = _implicit(request, kind)
        front = ["-I", header] if header and kind == "cxx" else []
        compiler = {"c": tools.cc, "cxx": tools.cxx, "cuda": tools.nvcc}[kind]
        commands.append((compiler, *front, *includes, *before, *flags, "-c", name, "-o", target))
        objects.append(target)
    output = f"{request.name}.so"
    device = "cuda" if request.uses_cuda else "cpu"
    return BuildPlan(
        files=tuple((file.name, file.text) for file in (*request.headers, *request.sources)),
        objects=tuple(commands),
        link=(tools.cxx or tools.cc, *objects, "-shared", *_link_flags(request, tools), "-o", output),
        output=output, search_path=tools.search_path(device), execute=tools.execute(device),
        read=tools.read + ((header,) if header else ()), lane="slow" if request.torch else "quick",
    )  # fmt: skip


def header_flags(request: CompileRequest, tools: Toolchain) -> tuple[str, ...] | None:
    """Flags that a precompiled `torch/extension.h` must be built with to fit the request; None where none can serve."""
    kinds = {_kind(source.name) for source in request.sources}
    if not (request.torch and request.implicit_headers and "cxx" in kinds) or "cuda" in kinds:
        return None  # nvcc takes no precompiled header and is the slower half
    # The module's name is free: torch's headers do not look at it.
    flags = (flag for flag in _host_flags(request, "cxx", tools) if not flag.startswith("-DTORCH_EXTENSION_NAME"))
    return (*_includes(request, tools), *flags)


def split_flags(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Flags as words: torch's builder hands them to a shell, so one string may hold several. Raises RefusedRequest."""
    words: list[str] = []
    for flag in flags:
        try:
            words += shlex.split(flag)
        except ValueError as error:
            raise RefusedRequest(f"the flag {flag!r} cannot be read: {error}") from error
    for word in words:
        if word in _REFUSED_EXACT or word.startswith(_REFUSED_PREFIXES):
            raise RefusedRequest(f"the flag {word!r} is not allowed here: leave it out")
    return tuple(words)


def _kind(name: str) -> str:
    suffix = os.path.splitext(name)[1]
    if suffix not in COMPILED:
        raise RefusedRequest(f"cannot build {name!r}: a source's name must end in {', '.join(COMPILED)}")
    return COMPILED[suffix]


def _require_tools(kinds: set[str], request: CompileRequest, tools: Toolchain) -> None:
    if not (tools.cc and tools.cxx):
        raise RefusedRequest("there is no C++ compiler on this machine: install g++")
    if "cuda" in kinds and not tools.nvcc:
        raise RefusedRequest("there is no nvcc on this machine: CUDA sources cannot be built here")
    if request.torch and not tools.torch_root:
        raise RefusedRequest("torch is not installed here: its headers are missing")


def _includes(request: CompileRequest, tools: Toolchain) -> list[str]:
    words = ["-I", "."]
    for path in request.include_paths:
        if not os.path.isabs(path):
            raise RefusedRequest(f"the include folder {path!r} is not absolute")
        words += ["-I", path]
    system = []
    if request.torch:
        root = os.path.join(tools.torch_root, "include")
        system += [root, os.path.join(root, "torch", "csrc", "api", "include"), tools.python_include]
    if request.uses_cuda and tools.cuda_home:
        system.append(os.path.join(tools.cuda_home, "include"))
    for path in system:
        words += ["-isystem", path]
    return words


def _defines(request: CompileRequest) -> list[str]:
    if not request.torch:
        return []
    return [f"-DTORCH_EXTENSION_NAME={request.name}", "-DTORCH_API_INCLUDE_EXTENSION_H"]


def _implicit(request: CompileRequest, kind: str) -> list[str]:
    if not (request.torch and request.implicit_headers) or kind == "c":
        return []
    headers = ("torch/types.h", "cuda.h", "cuda_runtime.h") if kind == "cuda" else ("torch/extension.h",)
    return [word for header in headers for word in ("-include", header)]


def _host_flags(request: CompileRequest, kind: str, tools: Toolchain) -> list[str]:
    own = split_flags(request.cflags)
    standard = [f"-std={tools.torch_std}"] if request.torch and kind == "cxx" else []
    return [*_defines(request), "-fPIC", *standard, *own, "-fmax-errors=20"]


def _cuda_flags(request: CompileRequest, tools: Toolchain, arch: str) -> list[str]:
    own = split_flags(request.cuda_cflags)
    words = [*_defines(request), *(_NVCC_DEFAULTS if request.torch else ()), "--compiler-options", "-fPIC", *own]
    if arch and not any("arch" in word for word in own):
        number = arch.replace(".", "")
        words.append(f"-gencode=arch=compute_{number},code=sm_{number}")
    if request.torch and not any(word.startswith(("-std=", "--std")) for word in own):
        words.append(f"-std={tools.torch_std}")
    return words


def _link_flags(request: CompileRequest, tools: Toolchain) -> list[str]:
    own = list(split_flags(request.ldflags))
    if request.torch:
        own += [f"-L{os.path.join(tools.torch_root, 'lib')}", "-lc10"]
        own += ["-lc10_cuda"] if request.uses_cuda and tools.torch_cuda else []
        own += ["-ltorch_cpu"]
        own += ["-ltorch_cuda"] if request.uses_cuda and tools.torch_cuda else []
        own += ["-ltorch", "-ltorch_python"]
    if request.uses_cuda and tools.cuda_home:
        folder = next(
            (name for name in ("lib64", "lib") if os.path.isdir(os.path.join(tools.cuda_home, name))), "lib64"
        )
        library = os.path.join(tools.cuda_home, folder)
        own += [f"-L{library}", f"-Wl,-rpath,{library}", "-lcudart"]
    if not request.torch and "-fopenmp" in split_flags(request.cflags):
        own.append("-fopenmp")  # an extension finds the OpenMP runtime that torch has loaded
    return own
