"""Kernels with measured speedups in performance buckets, in Redis; and what a run must not forget.

Invariants: one server-side script per write, idempotent, on one cluster slot (`keys`); an acknowledged write survives a
killed server; every evaluation is filed under task, GPU type, precision and protocol, and never compared across them;
a sample leaves its group once and a group reaches the learner once.
"""

from exemplar_store.config import StoreConfig
from exemplar_store.errors import StoreError
from exemplar_store.filed import CacheKey
from exemplar_store.server import EmbeddedServer
from exemplar_store.store import ExemplarStore, InsertResult
from exemplar_store.stream import GroupProgress, RunStream

__all__ = [
    "CacheKey", "EmbeddedServer", "ExemplarStore", "GroupProgress", "InsertResult", "RunStream", "StoreConfig",
    "StoreError",
]  # fmt: skip
