"""Prometheus metrics of the store's clients."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

INSERTS = Counter("kontrast_store_inserts_total", "Exemplars offered to the store.", ["result"])
"""`result` is new or known."""
CAPPED = Counter("kontrast_store_capped_total", "Exemplars removed by the caps of their bucket.")
DRAWS = Counter("kontrast_store_draws_total", "Draws of exemplars for a prompt.", ["strategy", "found"])
DRAW_SECONDS = Histogram(
    "kontrast_store_draw_seconds", "Time of one draw with its sources.",
    buckets=(0.0003, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.03, 0.1, 1.0),
)  # fmt: skip
CACHE_LOOKUPS = Counter("kontrast_store_cache_lookups_total", "Look-ups in the measurement cache.", ["result"])
"""`result` is hit or miss."""
RECORDED = Counter("kontrast_store_samples_recorded_total", "Samples that left their group.", ["outcome"])
RELAYED = Counter("kontrast_store_groups_relayed_total", "Complete groups moved from outboxes to the scored stream.")
