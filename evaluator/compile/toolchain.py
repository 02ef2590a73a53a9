"""Which compilers this machine has, and which programs a confined process must execute to use them.

Invariants: found by asking the compilers themselves, never by a list of distributions; links are resolved, since
landlock names files; the fingerprint changes whenever a compiler, torch or the processor does, so that an artefact of
one machine is never served on another that differs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from evaluator.worker.sandbox import holds_private

_PROGRAMS = ("cc1", "cc1plus", "collect2", "as", "ld", "ld.bfd", "ld.gold", "ld.lld", "lto-wrapper", "lto1")
"""What the drivers of gcc and clang execute."""
_LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1", "/lib/ld-musl-x86_64.so.1")
_SYSTEM = ("/usr/", "/lib", "/bin/", "/sbin/")
_ASK_S = 20.0


@dataclass(frozen=True)
class Toolchain:
    """What is installed. Paths are absolute, empty where a thing is missing."""

    cc: str
    cxx: str
    nvcc: str
    cuda_home: str
    nvrtc: str
    triton: bool
    torch_root: str
    torch_version: str
    torch_cuda: bool
    """Whether torch's own CUDA libraries are there to link with."""
    torch_std: str
    """The language standard that torch's own builder asks for."""
    python_include: str
    host_programs: tuple[str, ...]
    """Files that the system's compilers execute, links resolved."""
    cuda_programs: tuple[str, ...]
    """The same for nvcc, which runs its parts through `/bin/sh`, and for Triton."""
    read: tuple[str, ...]
    """Trees that compilers read beside the system's."""
    fingerprint: str

    def execute(self, device: str = "cpu") -> tuple[str, ...]:
        """Files that a worker on the device may execute.

        On `cpu` no shell and no interpreter is among them, unless the system's compiler is itself a script.
        """
        return self.host_programs if device == "cpu" else (*self.host_programs, *self.cuda_programs)

    def search_path(self, device: str = "cpu") -> str:
        """The PATH under which a confined process finds the compilers."""
        folders = [os.path.dirname(program) for program in (self.cc, self.cxx) if program]
        if device != "cpu" and self.nvcc:
            folders.insert(0, os.path.dirname(self.nvcc))
        return ":".join(dict.fromkeys([*folders, "/usr/bin", "/bin"]))


@lru_cache(maxsize=1)
def discover() -> Toolchain:
    """Looks the machine over once; takes some tens of milliseconds and never fails: what is missing is empty."""
    cc = _first("CC", "cc", "gcc")
    cxx = _first("CXX", "c++", "g++")
    host = _host_programs(tuple(tool for tool in (cc, cxx) if tool))
    nvcc = _real_nvcc()
    cuda_home = str(Path(nvcc).parents[1]) if nvcc else ""
    torch_root, torch_version, torch_std = _torch()
    return Toolchain(
        cc=cc, cxx=cxx, nvcc=nvcc, cuda_home=cuda_home, nvrtc=_nvrtc(cuda_home),
        triton=importlib.util.find_spec("triton") is not None,
        torch_root=torch_root, torch_version=torch_version, torch_std=torch_std,
        torch_cuda=os.path.exists(os.path.join(torch_root, "lib", "libtorch_cuda.so")),
        python_include=sysconfig.get_path("include"),
        host_programs=host, cuda_programs=_cuda_programs(cuda_home),
        read=tuple(p for p in (cuda_home, torch_root, sysconfig.get_path("include"), *_prefixes(host)) if p),
        fingerprint=_fingerprint(host, nvcc, torch_version),
    )  # fmt: skip


def _first(variable: str, *names: str) -> str:
    for name in (os.environ.get(variable, ""), *names):
        found = shutil.which(name) if name else None
        if found:
            return found
    return ""


def _ask(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_ASK_S, env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _host_programs(drivers: tuple[str, ...]) -> tuple[str, ...]:
    found = set(drivers)
    for driver in drivers:
        searched = re.search(r"^programs: =?(.*)$", _ask([driver, "-print-search-dirs"]), re.MULTILINE)
        folders = searched.group(1).split(":") if searched else []
        for program in _PROGRAMS:
            inner = (os.path.join(folder, program) for folder in folders)
            found.add(next((path for path in inner if os.path.isfile(path)), "") or shutil.which(program) or "")
    # Candidates and nvcc call the drivers by these names whatever CC and CXX say.
    found |= {shutil.which(name) or "" for name in ("cc", "c++", "gcc", "g++", "clang", "clang++")}
    found |= {loader for loader in _LOADERS if os.path.exists(loader)}
    files = {os.path.realpath(path) for path in found if path and os.path.isfile(path)}
    return tuple(sorted(files | {part for path in files for part in _script_parts(path)}))


def _script_parts(path: str) -> set[str]:
    """What a driver that is a script runs: its interpreter, and the programs beside it whose names begin with its."""
    with open(path, "rb") as file:
        line = file.readline(256)
    if not line.startswith(b"#!"):
        return set()
    words = line[2:].decode("utf-8", "replace").split()
    if words and os.path.basename(words[0]) == "env":
        words += [shutil.which(word) or "" for word in words[1:] if not word.startswith("-")]
    folder, name = os.path.split(path)
    beside = [os.path.join(folder, other) for other in os.listdir(folder) if other.startswith(name)]
    parts = [part for part in (*words, *beside) if os.path.isabs(part) and os.access(part, os.X_OK)]
    return {os.path.realpath(part) for part in parts if os.path.isfile(part)}


def _prefixes(programs: tuple[str, ...]) -> tuple[str, ...]:
    """Where compilers lie that were installed outside the system's folders: they read headers and libraries there."""
    folders = {os.path.dirname(program) for program in programs if not program.startswith(_SYSTEM)}
    trees = {os.path.dirname(folder) if os.path.basename(folder) == "bin" else folder for folder in folders}
    return tuple(sorted(tree for tree in trees if not holds_private(tree)))


def _real_nvcc() -> str:
    for place in (os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", "")):
        if place and os.path.isfile(os.path.join(place, "bin", "nvcc")):
            return os.path.realpath(os.path.join(place, "bin", "nvcc"))
    found = shutil.which("nvcc") or ("/usr/local/cuda/bin/nvcc" if os.path.isfile("/usr/local/cuda/bin/nvcc") else "")
    if not found:
        return ""
    # A wrapper script in PATH is common; the driver says where it lives.
    top = re.search(r"^#\$ TOP=(\S+)", _ask_error([found, "--dryrun", "-x", "cu", "/dev/null"]), re.MULTILINE)
    home = os.path.realpath(top.group(1)) if top else str(Path(os.path.realpath(found)).parents[1])
    inner = os.path.join(home, "bin", "nvcc")
    return inner if os.path.isfile(inner) else os.path.realpath(found)


def _ask_error(argv: list[str]) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=_ASK_S).stderr
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _cuda_programs(home: str) -> tuple[str, ...]:
    folders = [os.path.join(home, "bin"), os.path.join(home, "nvvm", "bin"), *_triton_folders()]
    shell = [os.path.realpath("/bin/sh")] if os.path.exists("/bin/sh") else []
    others = [shutil.which("rm"), *(path for path in ("/sbin/ldconfig", "/sbin/ldconfig.real") if os.path.exists(path))]
    files = [os.path.realpath(path) for path in others if path]
    return tuple(folder for folder in folders if os.path.isdir(folder)) + tuple(shell) + tuple(files)


def _triton_folders() -> list[str]:
    """Where Triton keeps its own ptxas; it also asks ldconfig where the driver lies."""
    spec = importlib.util.find_spec("triton")
    return [os.path.join(os.path.dirname(spec.origin), "backends", "nvidia", "bin")] if spec and spec.origin else []


def _nvrtc(home: str) -> str:
    places = [Path(home) / "lib64"] if home else []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        places += sorted(Path(root).glob("*/lib"))
    for place in places:
        found = sorted(place.glob("libnvrtc.so*"))
        if found:
            return str(found[0])
    return ""


def _torch() -> tuple[str, str, str]:
    """Folder, version and C++ standard of torch, read as text: importing it would cost a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return "", "", "c++17"
    root = Path(spec.origin).parent
    version = re.search(r"__version__ = '([^']+)'", (root / "version.py").read_text())
    builder = (root / "utils" / "cpp_extension.py").read_text()
    standards = re.findall(r"-std=(c\+\+\d+)", builder)
    return str(root), version.group(1) if version else "", max(standards, default="c++17")


def _fingerprint(programs: tuple[str, ...], nvcc: str, torch_version: str) -> str:
    hasher = hashlib.sha256()
    for program in (*programs, nvcc):
        if program:
            status = os.stat(program)
            hasher.update(f"{program}:{status.st_size}:{status.st_mtime_ns};".encode())
    hasher.update(f"{torch_version};{sys.implementation.cache_tag};{platform.machine()};{_processor()}".encode())
    return hasher.hexdigest()


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return "".join(re.findall(r"^(?:model name|flags|Features)\s*:.*$", text, re.MULTILINE)[:2])
