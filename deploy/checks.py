"""Checks of the environment, one function each; heavy imports happen in processes of their own.

Invariants: a check never raises; it answers ok, warn (a feature is missing) or fail (nothing runs), and a warn or fail
says what to do.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.errors import KontrastError
from tasks.integrity import check_integrity

IMPORT_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Check:
    """The answer of one check."""

    name: str
    status: Literal["ok", "warn", "fail"]
    message: str


def run_checks(*, fast: bool = False) -> Iterator[Check]:
    """All checks in order, one at a time."""
    checks: list[Callable[[], Check]] = [
        _platform, _python, _headers, _compiler, _integrity, _torch, _torchvision, _redis_server, _sandbox, _gpu, _ray,
    ]  # fmt: skip
    if not fast:
        checks += [_vllm, _deepspeed]
    for check in checks:
        yield check()


def _platform() -> Check:
    name = f"{platform.system()} {platform.machine()}"
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        return Check("platform", "ok", name)
    return Check("platform", "fail", f"{name}; Linux x86-64 is needed: use a virtual machine, a container or WSL2")


def _python() -> Check:
    version = platform.python_version()
    if sys.version_info[:2] == (3, 11):
        return Check("python", "ok", version)
    return Check("python", "fail", f"{version}; 3.11 is needed: make the virtual environment with python3.11 -m venv")


def _headers() -> Check:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if header.is_file():
        return Check("python headers", "ok", str(header))
    return Check(
        "python headers", "fail",
        f"{header} is missing: apt install python3.11-dev (Debian) or dnf install python3.11-devel (Fedora)",
    )  # fmt: skip


def _compiler() -> Check:
    missing = [name for name in ("g++", "make") if shutil.which(name) is None]
    if not missing:
        return Check("compiler", "ok", str(shutil.which("g++")))
    return Check(
        "compiler", "fail",
        f"{' and '.join(missing)} not found: apt install g++ make (Debian) or dnf install gcc-c++ make (Fedora)",
    )  # fmt: skip


def _integrity() -> Check:
    try:
        return Check("kontrast", "ok", f"one root, source {check_integrity()[:12]}")
    except KontrastError as error:
        return Check("kontrast", "fail", str(error))


def _import(code: str) -> tuple[bool, str]:
    """Runs code in a fresh interpreter with this one's path: (success, its output or its last error line)."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "DS_ACCELERATOR": "cpu"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False,
            env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False, f"did not finish in {IMPORT_TIMEOUT_S:g} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else ""


def _torch() -> Check:
    works, text = _import("import torch; print(torch.__version__, 'CUDA', torch.version.cuda)")
    if works:
        return Check("torch", "ok", text)
    return Check("torch", "fail", f"cannot be imported ({text}): pip install -r requirements/cpu.txt")


def _torchvision() -> Check:
    if importlib.util.find_spec("torchvision") is None:
        return Check("torchvision", "ok", "absent, as it should be")
    works, text = _import("import torch, torchvision; print(torchvision.__version__)")
    if works:
        return Check("torchvision", "ok", text)
    return Check(
        "torchvision", "fail",
        f"does not match torch ({text}) and breaks vLLM and transformers: pip uninstall torchvision torchaudio",
    )  # fmt: skip


def _redis_server() -> Check:
    try:
        from exemplar_store.server import find_server_binary

        return Check("redis server", "ok", str(find_server_binary()))
    except KontrastError as error:
        return Check("redis server", "warn", str(error))


def _sandbox() -> Check:
    works, text = _import("from deploy.sandbox_probe import main; main()")
    if not works or not text:
        return Check("sandbox", "fail", f"no layer works here ({text}): candidates run only with allow_unsandboxed")
    return Check("sandbox", "ok", text)


def _gpu() -> Check:
    from deploy.devices import describe_gpus

    gpus = describe_gpus()
    if not gpus:
        return Check("gpu", "warn", "no NVIDIA driver: only device cpu can be measured here")
    return Check(
        "gpu", "ok", "; ".join(f"{gpu['name']} {gpu['memory_gib']} GiB, driver {gpu['driver']}" for gpu in gpus)
    )


def _ray() -> Check:
    works, text = _import("import ray; print(ray.__version__)")
    if works:
        return Check("ray", "ok", text)
    return Check("ray", "fail", f"cannot be imported ({text}): pip install -r requirements/cpu.txt")


def _vllm() -> Check:
    works, text = _import("import vllm; from vllm import LLM; print(vllm.__version__)")
    if works:
        return Check("vllm", "ok", text)
    return Check("vllm", "warn", f"cannot be imported ({text}): the transformers engine is used, which is slower")


def _deepspeed() -> Check:
    works, text = _import("import deepspeed; print(deepspeed.__version__)")
    if works:
        return Check("deepspeed", "ok", text)
    return Check("deepspeed", "fail", f"cannot be imported ({text}): pip install -r requirements/cpu.txt")
