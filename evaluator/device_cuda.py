"""CUDA devices by the driver's management library, which needs no context: which there are, and how one is doing.

Invariants: the judge never touches CUDA; a device is known by its UUID, whatever CUDA_VISIBLE_DEVICES calls it; a
reading that a device does not offer is left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evaluator.device import Device
from tasks.errors import UsageError

RUNTIME = "evaluator.worker.cudart"
"""Imported before the fork: a confined worker cannot read the project."""
_VENDOR_WORDS = frozenset(("NVIDIA", "Tesla", "GeForce", "Quadro", "Graphics"))


def type_of(product: str) -> str:
    """`H200` for `NVIDIA H200`, `A100` for `NVIDIA A100-SXM4-80GB`, `RTX4090` for `NVIDIA GeForce RTX 4090`."""
    words = [word for word in product.split() if word not in _VENDOR_WORDS]
    if not words:
        return product.replace(" ", "") or "cuda"
    if words[0] in ("RTX", "GTX", "TITAN") and len(words) > 1:
        return words[0] + words[1]
    return words[0].split("-")[0]


def open_cuda(name: str) -> Device:
    """The device called `cuda` or `cuda:INDEX`, counted as CUDA_VISIBLE_DEVICES lists them. Raises UsageError."""
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise UsageError(f"there is no device {name!r}: use cuda or cuda:INDEX")
    index = int(match.group(1) or 0)
    nvml = _nvml()
    handles = _visible(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if index >= len(handles):
        raise UsageError(f"there is no device cuda:{index} here: {len(handles)} CUDA device(s) are visible")
    handle = handles[index]
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    arms, rest = split_cores(sorted(os.sched_getaffinity(0)), index, len(handles))
    return Device(
        name=f"cuda:{index}", type=type_of(_text(nvml.nvmlDeviceGetName(handle))), arm_cores=arms, judge_cores=rest,
        lock_path=_lock_path(nvml, handle, uuid), runtime=RUNTIME,
        environment=(("CUDA_VISIBLE_DEVICES", uuid), ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")), modules=(RUNTIME, "triton"),
        uuid=uuid,
    )  # fmt: skip


def split_cores(cores: list[int], index: int, devices: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The core of both arms of a device, and the cores of everything else.

    Arms never run at once; on a core of their own each, what they do beside the device would differ by as much as two
    cores of a virtual machine do. Each device has its own arm core, from the last one down, where there are enough for
    half of them to remain.
    """
    taken = cores[-min(devices, max(1, len(cores) // 2)) :]
    arm = taken[-1 - index % len(taken)]
    return (arm,), tuple(core for core in cores if core not in taken) or (arm,)


def _nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError as error:
        raise UsageError("CUDA devices are found by nvidia-ml-py, which is missing: install it") from error
    except pynvml.NVMLError as error:
        raise UsageError(f"there is no CUDA device here: the NVIDIA driver says {error}") from error
    return pynvml


def _visible(nvml: Any, listed: str | None) -> list[Any]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if listed is None:
        return handles
    found = []
    for word in (word.strip() for word in listed.split(",")):
        by_uuid = [handle for handle in handles if word and _text(nvml.nvmlDeviceGetUUID(handle)).startswith(word)]
        if word.isdigit() and int(word) < len(handles):
            found.append(handles[int(word)])
        elif len(by_uuid) == 1:
            found += by_uuid
        else:
            break  # as CUDA reads it: nothing behind an entry that names no device
    return found


def _lock_path(nvml: Any, handle: Any, uuid: str) -> str:
    with contextlib.suppress(nvml.NVMLError):
        node = Path(f"/dev/nvidia{nvml.nvmlDeviceGetMinorNumber(handle)}")
        if node.exists() and os.access(node, os.R_OK):
            return str(node)
    return str(Path(tempfile.gettempdir()) / f"kontrast-{uuid}.lock")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class Gauges:
    """Clocks, power, temperature and memory of one device."""

    def __init__(self, uuid: str) -> None:
        self._nvml = _nvml()
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)

    def read(self) -> dict[str, float]:
        """What the device shows now: `sm_mhz`, `memory_mhz`, `power_w`, `temperature_c`, `reasons` (a bit mask)."""
        nvml, handle = self._nvml, self._handle
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        asked: dict[str, Callable[[], float]] = {
            "sm_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "memory_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "reasons": lambda: float((reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle)),
        }
        found = {}
        for name, ask in asked.items():
            with contextlib.suppress(nvml.NVMLError):
                found[name] = ask()
        return found

    def peaks(self) -> dict[str, float]:
        """What the device's properties promise: `bytes_per_s` of its memory, `fp32_per_s` of its plain fp32 units.

        At the highest clocks: memory moves two words a clock over the bus's width, a unit does a multiplication and an
        addition.
        """
        nvml, handle = self._nvml, self._handle
        asked: dict[str, Callable[[], float]] = {
            "bytes_per_s": lambda: (
                2e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
                * nvml.nvmlDeviceGetMemoryBusWidth(handle) / 8
            ),
            "fp32_per_s": lambda: (
                2e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM) * nvml.nvmlDeviceGetNumGpuCores(handle)
            ),
        }  # fmt: skip
        found = {}
        for name, ask in asked.items():
            with contextlib.suppress(nvml.NVMLError):
                found[name] = ask()
        return found

    def used_bytes(self, pid: int) -> int:
        """Device memory that a process holds; 0 when the driver does not say."""
        with contextlib.suppress(self._nvml.NVMLError):
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
                if process.pid == pid:
                    return int(process.usedGpuMemory or 0)
        return 0
