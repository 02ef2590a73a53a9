"""The learner's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

POLICY_STEP = Gauge("kontrast_learner_policy_step", "Optimizer steps of the policy")
GROUPS = Counter("kontrast_learner_groups", "Groups that left the learner, by word", ["fate"])
STEP_SECONDS = Histogram(
    "kontrast_learner_step_seconds", "Seconds of one optimizer step", buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300)
)
CHECKPOINT_SECONDS = Histogram(
    "kontrast_learner_checkpoint_seconds", "Seconds of writing a checkpoint", buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300)
)
PUBLISH_SECONDS = Histogram(
    "kontrast_learner_publish_seconds",
    "Seconds of each phase of a publication",
    ["phase"],
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)
TOKENS_PER_SECOND = Gauge("kontrast_learner_tokens_per_second", "Tokens computed per second in the last step")
REWARD_MEAN = Gauge("kontrast_learner_reward_mean", "Mean reward of the last step's samples")
ACCEPTED_SHARE = Gauge("kontrast_learner_accepted_share", "Share of accepted samples in the last step")
COPY_SHARE = Gauge("kontrast_learner_copy_share", "Share of copies of shown exemplars in the last step")
EDIT_DISTANCE = Gauge("kontrast_learner_edit_distance", "Mean relative distance to the nearest shown exemplar")
LOSS = Gauge("kontrast_learner_loss", "Loss of the last step; near zero by construction at ratio 1")
GRADIENT_NORM = Gauge("kontrast_learner_gradient_norm", "Gradient norm of the last step, before clipping")
ENTROPY = Gauge("kontrast_learner_entropy", "Mean entropy of the policy's tokens, nats")
MISMATCH_KL = Gauge("kontrast_learner_mismatch_kl", "KL of the sampler's from the trainer's probabilities, per token")
STALENESS_MAX = Gauge("kontrast_learner_staleness_max", "Most policy steps between a trained token and its step")

_GAUGES = {
    "tokens_per_s": TOKENS_PER_SECOND, "reward_mean": REWARD_MEAN, "accepted_share": ACCEPTED_SHARE,
    "copy_share": COPY_SHARE, "edit_distance": EDIT_DISTANCE, "loss": LOSS, "gradient_norm": GRADIENT_NORM,
    "entropy": ENTROPY, "mismatch_kl": MISMATCH_KL, "staleness_max": STALENESS_MAX,
}  # fmt: skip


def observe_step(step: int, figures: Mapping[str, float]) -> None:
    """Sets what one optimizer step measured."""
    POLICY_STEP.set(step)
    for name, gauge in _GAUGES.items():
        if name in figures:
            gauge.set(figures[name])
    if "seconds" in figures:
        STEP_SECONDS.observe(figures["seconds"])
