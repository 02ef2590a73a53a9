"""The `store` section of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tasks.config import Section


class BucketCaps(Section):
    """How many exemplars of one bucket are kept; all three zero, the default, means no limit.

    A bucket that outgrew the sum by a quarter is cut to the union of its best, its newest and a uniform random sample
    of it. Pinned exemplars, such as the best that each run has found, stay whatever the caps say.
    """

    best: int = Field(default=0, ge=0)
    """Highest speedups kept per bucket."""
    newest: int = Field(default=0, ge=0)
    """Latest arrivals kept per bucket."""
    random: int = Field(default=0, ge=0)
    """Size of the uniform random sample kept per bucket."""


class StoreConfig(Section):
    """Where exemplars live and how they are drawn."""

    location: str = ""
    """`redis://`, `rediss://`, `unix://` or `redis+sentinel://` URL, or the folder of an embedded server; empty: the
    run's own folder."""
    namespace: str = Field(default="kontrast", pattern=r"^[A-Za-z0-9_.-]+$")
    """First part of every key, so that several stores can share one server."""
    strategy: Literal["buckets", "islands", "random", "none"] = "buckets"
    """How exemplars for a prompt are chosen: CUDA-L1's Eq. 1, FunSearch's islands, uniformly, or not at all."""
    bucket_scale: Literal["linear", "log"] = "linear"
    """Scale on which buckets have equal width, and on which Eq. 1 takes its means: the speedup or its natural log."""
    bucket_width: float = Field(default=0.1, ge=1e-6)
    """Width of a bucket (Eq. 1's delta), on the chosen scale; wider than the noise of a measurement."""
    temperature: float = Field(default=0.5, gt=0)
    """Eq. 1's tau, on the chosen scale; small prefers the fastest bucket, large makes all buckets equal."""
    islands: int = Field(default=5, ge=2)
    """Number of islands of the strategy `islands`."""
    island_reset_every: int = Field(default=200, ge=1)
    """Arrivals at one task after which the worse half of its islands is emptied and reseeded from the better half."""
    caps: BucketCaps = BucketCaps()
    """Limits of one bucket."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait for an embedded server to load its data."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    """Longest wait for a connection."""
    reply_timeout_s: float = Field(default=30.0, gt=0)
    """Longest wait for one reply."""
    retries: int = Field(default=12, ge=0)
    """Attempts after a lost connection, with growing pauses, before the store counts as unreachable; 12 take about ten
    seconds: a server's restart or a failover."""
    retry_cap_s: float = Field(default=2.0, gt=0)
    """Longest pause between two attempts."""
