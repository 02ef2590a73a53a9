"""The compile pool's section of the configuration."""

from __future__ import annotations

from pydantic import Field

from tasks.config import Section


class CompileConfig(Section):
    """Building what candidates hand to `torch.utils.cpp_extension`."""

    cache_dir: str = ""
    """Folder of finished libraries; empty: `kontrast/compile` under `$XDG_CACHE_HOME` or `~/.cache`."""
    cache_mib: int = Field(default=2048, ge=0)
    """Size at which the least recently used libraries are dropped; 0 keeps nothing."""
    precompiled_header_mib: int = Field(default=3072, ge=0)
    """Disk for precompiled `torch/extension.h` (0.8 GiB a set of flags, builds on CPU in half the time); 0: none."""
    precompile_after: int = Field(default=3, ge=1)
    """Builds with the same flags after which their header is precompiled, where 8 GiB of memory are free."""
    quick_jobs: int = Field(default=2, ge=1)
    """Builds at a time that take no torch headers; a slow one never holds their place."""
    slow_jobs: int = Field(default=1, ge=1)
    """Builds at a time that take torch headers (25 s of a core and 1-2 GiB each)."""
    timeout_s: float = Field(default=300.0, gt=0)
    """One build, its wait in the queue not counted."""
    memory_mib: int = Field(default=6144, ge=256)
    """Resident memory of one build at which it is ended."""
    output_mib: int = Field(default=256, ge=1)
    """Largest file that a build may write."""
    arch: str = ""
    """CUDA architecture such as `9.0` or `9.0a`; empty: that of the evaluator's device type, never of a visible GPU."""
