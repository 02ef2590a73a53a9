"""Which device and number format the policy is trained in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Dtype = Literal["bf16", "fp32"]


def resolve_device(device: str) -> str:
    """`auto` becomes `cuda` where there is one, else `cpu`."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_dtype(dtype: str, device: str) -> Dtype:
    """`auto` becomes bf16 where the processor multiplies it natively, else fp32 (then four times faster)."""
    if dtype != "auto":
        return "bf16" if dtype == "bf16" else "fp32"
    return "bf16" if device != "cpu" or cpu_multiplies_bf16() else "fp32"


def cpu_multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor has bf16 products (AVX-512 BF16 or AMX); False where it cannot be read."""
    try:
        flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags.split())
