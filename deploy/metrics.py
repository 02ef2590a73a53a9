"""Prometheus metrics of a run as its events tell it, and of the coordinator."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SAMPLES = Gauge("kontrast_run_samples", "Samples of the run by where they are.", ["state"])
"""`state` is one of the sample ledger's figures; dispatched equals the sum of the others."""
GROUPS = Gauge("kontrast_run_groups", "Groups of the run by what became of them.", ["state"])
"""`state` is one of the group ledger's figures; formed equals the sum of the others."""
PHASE = Gauge("kontrast_run_phase", "1 for the phase that the run is in, else 0.", ["phase"])
POLICY_STEP = Gauge("kontrast_run_policy_step", "Optimizer steps of the surviving lineage.")
EVALUATIONS = Counter(
    "kontrast_run_evaluations_total", "Evaluations of samples and seed kernels.", ["device_type", "outcome", "reason"]
)
REVIEWS = Counter("kontrast_run_reviews_total", "Large jumps by what the reviewing model said of them.", ["verdict"])
"""`verdict` is honest, cheat, unsure, or failed where no answer came."""
SPEEDUP = Histogram(
    "kontrast_run_speedup", "Speedup of accepted samples over their reference.", ["device_type"],
    buckets=(0.25, 0.5, 0.8, 0.95, 1.0, 1.05, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0),
)  # fmt: skip
BEST_SPEEDUP = Gauge("kontrast_run_best_speedup", "Best new accepted kernel of a task.", ["task", "device_type"])
NEW_TOKENS = Counter("kontrast_run_tokens_total", "Tokens of samples that left.")
COPIES = Counter("kontrast_run_copies_total", "Accepted samples that equal a seed or shown exemplar.")
STEP_FIGURES = Gauge("kontrast_run_learner_figure", "The learner's own figures of its latest step.", ["figure"])
HELD_OUT = Gauge(
    "kontrast_run_held_out", "Latest figures of each held-out set.", ["set", "device_type", "exemplars", "figure"]
)
PUBLISH_SECONDS = Gauge("kontrast_run_publish_seconds", "Seconds of the latest publication by phase.", ["phase"])
_TIMING = ["device_type", "protocol"]
QUARANTINED = Gauge(
    "kontrast_run_evaluators_quarantined", "Evaluators out of use after failed health probes.", ["device_type"]
)
CONTROLS = Gauge("kontrast_run_controls", "Newest measurements of references against themselves that count.", _TIMING)
CONTROL_FAILURES = Gauge("kontrast_run_control_failures", "Controls among the newest that were not accepted.", _TIMING)
CONTROL_COVERAGE = Gauge("kontrast_run_control_coverage", "Share of the controls' intervals that cover 1.", _TIMING)
CONTROL_BIAS = Gauge("kontrast_run_control_bias", "Mean log speedup of the controls; 0 is right.", _TIMING)
CONTROL_HALF_WIDTH = Gauge("kontrast_run_control_half_width", "Mean half-width of their intervals, in logs.", _TIMING)
CONTROL_ALARM = Gauge("kontrast_run_control_alarm", "1 while the controls say that the evaluator is off.", _TIMING)
COORDINATOR_STARTS = Gauge("kontrast_run_coordinator_incarnation", "How often a coordinator has taken the run over.")
