"""Metrics of a run over HTTP, found by Prometheus through file-based discovery.

Invariants: the figures follow from the run's events, so that they survive the restart of any actor; nothing listens
beyond loopback unless the configuration says so; a discovery file exists as long as its target does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from deploy import metrics
from deploy.graph.events import (
    Event,
    HeldOutMeasured,
    Phase,
    SampleLeft,
    SeedEvaluated,
    StepLearned,
    VersionPublished,
)
from deploy.graph.state import RunState

PHASES: tuple[str, ...] = get_args(Phase)
HELD_OUT_FIGURES = ("mean_log_speedup", "accepted_share", "above_share", "distinct_accepted")


class RunMetrics:
    """Sets this process's metrics from a run's state."""

    def update(self, state: RunState, fresh: Iterable[Event]) -> None:
        """Gauges from the whole state, counters from the events that are new."""
        for name, count in state.ledger.samples.counts().items():
            metrics.SAMPLES.labels(name).set(count)
        for name, count in state.ledger.groups.counts().items():
            metrics.GROUPS.labels(name).set(count)
        for phase in PHASES:
            metrics.PHASE.labels(phase).set(float(phase == state.phase))
        metrics.POLICY_STEP.set(state.step)
        metrics.COORDINATOR_STARTS.set(state.incarnation)
        for key, control in state.controls.items():
            metrics.CONTROLS.labels(*key).set(control.measured)
            metrics.CONTROL_FAILURES.labels(*key).set(control.failed)
            metrics.CONTROL_COVERAGE.labels(*key).set(control.coverage)
            metrics.CONTROL_BIAS.labels(*key).set(control.bias_log)
            metrics.CONTROL_HALF_WIDTH.labels(*key).set(control.half_width_log)
            metrics.CONTROL_ALARM.labels(*key).set(float(bool(control.alarm)))
        for event in fresh:
            self._count(state, event)
        for (task, device_type), best in state.best().items():
            metrics.BEST_SPEEDUP.labels(task, device_type).set(best.speedup or 0.0)

    def _count(self, state: RunState, event: Event) -> None:
        match event:
            case SampleLeft():
                group = state.groups.get(event.group_id)
                device_type = group.device_type if group else ""
                if event.outcome != "cancelled":
                    metrics.EVALUATIONS.labels(device_type, event.outcome, event.reason).inc()
                if event.outcome == "accepted" and event.speedup:
                    metrics.SPEEDUP.labels(device_type).observe(event.speedup)
                if event.review:
                    metrics.REVIEWS.labels(event.review).inc()
                metrics.COPIES.inc(event.label == "copy")
                metrics.NEW_TOKENS.inc(event.new_tokens)
            case SeedEvaluated():
                metrics.EVALUATIONS.labels(event.device_type, event.outcome, event.reason).inc()
            case StepLearned():
                for name, value in event.metrics.items():
                    metrics.STEP_FIGURES.labels(name).set(value)
            case HeldOutMeasured():
                for figure in HELD_OUT_FIGURES:
                    labels = (event.name, event.device_type, "shown" if event.exemplars else "none", figure)
                    metrics.HELD_OUT.labels(*labels).set(getattr(event, figure))
            case VersionPublished():
                for name, value in event.seconds_by_phase.items():
                    metrics.PUBLISH_SECONDS.labels(name).set(value)
            case _:
                pass


class Exporter:
    """Serves this process's metrics, and announces them in a folder that Prometheus's file_sd watches."""

    def __init__(self, folder: Path, job: str, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._folder, self._job, self._host, self._port = folder, job, host, port
        self._file: Path | None = None
        self.address = ""

    def start(self) -> Exporter:
        """Starts serving; raises OSError when the port is taken."""
        from prometheus_client import start_http_server

        self._server, self._thread = start_http_server(self._port, addr=self._host)
        self.address = f"{self._host}:{self._server.server_port}"
        self._folder.mkdir(parents=True, exist_ok=True)
        target = [{"targets": [self.address], "labels": {"kontrast_job": self._job}}]
        self._file = self._folder / f"{self._job}-{os.getpid()}.json"
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(target))
        partial.replace(self._file)
        return self

    def stop(self) -> None:
        """Stops serving and takes the announcement back. Safe to call twice."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=5)
