"""Prometheus metrics of the evaluators."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from tasks.records import Evaluation

EVALUATIONS = Counter(
    "kontrast_evaluator_evaluations_total", "Evaluations by what came of them.", ["device_type", "outcome", "reason"]
)
STEP_SECONDS = Histogram(
    "kontrast_evaluator_step_seconds",
    "Time that candidates spent in a step.",
    ["device_type", "step"],
    buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
LOCK_WAIT_SECONDS = Counter(
    "kontrast_evaluator_lock_wait_seconds_total", "Time that timings waited for the device.", ["device_type"]
)
RESTARTS = Counter("kontrast_evaluator_restarts_total", "Zygotes started, the first included.", ["device_type"])
CONTROL_RATIO = Gauge(
    "kontrast_evaluator_control_ratio",
    "The reference against itself in the newest control; 1 is right.",
    ["device_type"],
)


def count(evaluation: Evaluation, waited_s: float) -> None:
    """Counts one finished evaluation."""
    device = evaluation.device_type
    EVALUATIONS.labels(device, evaluation.outcome, evaluation.reason or "").inc()
    for step, seconds in evaluation.seconds_by_step.items():
        STEP_SECONDS.labels(device, step).observe(seconds)
    LOCK_WAIT_SECONDS.labels(device).inc(waited_s)
