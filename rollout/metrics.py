"""Prometheus metrics of the rollout."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

COMPLETIONS = Counter("kontrast_rollout_completions_total", "Completions finished.", ["engine", "finish_reason"])
TOKENS = Counter("kontrast_rollout_tokens_total", "Tokens drawn.", ["engine"])
PROMPT_TOKENS = Histogram(
    "kontrast_rollout_prompt_tokens", "Length of prompts.", buckets=(64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
)
PROMPT_EXEMPLARS = Counter("kontrast_rollout_prompt_exemplars_total", "Prompts by exemplars shown.", ["shown", "drawn"])
SKIPPED = Counter("kontrast_rollout_prompts_skipped_total", "Prompts that could not be made.", ["reason"])
PARSED = Counter("kontrast_rollout_parsed_total", "Completions read, by what was wrong with them.", ["error"])
ENGINE_DEATHS = Counter("kontrast_rollout_engine_deaths_total", "Engines that died.", ["engine"])
UPDATE_SECONDS = Histogram(
    "kontrast_rollout_update_seconds",
    "Time of each phase of a weight update in the engine.",
    ["phase"],
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
POLICY_STEP = Gauge("kontrast_rollout_policy_step", "Step of the policy version that the engine draws from.")
