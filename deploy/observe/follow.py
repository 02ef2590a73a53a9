"""Follows a run from outside: reads its stream, keeps `events.jsonl`, shows progress, writes the summary.

Invariants: knows the run only by its events, so that a restarted coordinator is not even noticed; every event is
written to `events.jsonl` once, in order, whatever was there before.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from deploy.folder import RunFolder
from deploy.graph.events import ControlMeasured, Event, LineageStarted, StepLearned, event_from_dict
from deploy.graph.plan import RunPlan
from deploy.graph.state import RunState
from deploy.observe import progress
from deploy.observe.export import RunMetrics
from deploy.observe.report import summarize
from deploy.observe.writers import Writers

_log = logging.getLogger(__name__)
Show = Callable[[progress.Progress], None]


class Follower:
    """The observer of one run."""

    def __init__(
        self,
        run: RunFolder,
        plan: RunPlan,
        read: Callable[[int], Iterable[dict[str, Any]]],
        show: Show,
        *,
        started_s: float | None = None,
        metrics: RunMetrics | None = None,
        writers: Writers | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`read(n)` gives the stream's events from number n (0 is the first) on; the command began at `started_s`."""
        self.state = RunState()
        self._run, self._plan, self._read, self._show, self._clock = run, plan, read, show, clock
        self._metrics = metrics
        self._writers = writers
        self._started_s = clock() if started_s is None else started_s
        self._seen = 0
        self._warned: set[tuple[str, str]] = set()
        self._written = sum(1 for _ in run.events.open()) if run.events.is_file() else 0

    def catch_up(self) -> list[Event]:
        """Takes in what is new in the stream; returns it."""
        fresh: list[Event] = []
        with self._run.events.open("a") as file:
            for value in self._read(self._seen):
                event = event_from_dict(value)
                self._seen += 1
                self.state.apply(event)
                fresh.append(event)
                if isinstance(event, ControlMeasured):
                    self._warn(event)
                if self._seen > self._written:
                    file.write(json.dumps(value, sort_keys=True) + "\n")
                    self._written = self._seen
                    self._pass_on(event)
        if self._metrics is not None:
            self._metrics.update(self.state, fresh)
        return fresh

    def _pass_on(self, event: Event) -> None:
        """The learner's figures, each step of each lineage once."""
        if self._writers is None:
            return
        if isinstance(event, StepLearned):
            self._writers.write(event.step, event.metrics)
        elif isinstance(event, LineageStarted):
            self._writers.restart(event.step)

    def _warn(self, control: ControlMeasured) -> None:
        """Says an alarm once."""
        key = (control.device_type, control.protocol)
        if control.alarm and key not in self._warned:
            self._warned.add(key)
            _log.warning("The evaluator is off on %s under %s: %s.", *key, control.alarm)

    def show(self) -> None:
        """Shows the figures of this moment."""
        self._show(progress.measure(self.state, self._plan, started_s=self._started_s, now_s=self._clock()))

    def summarize(self) -> dict[str, Any]:
        """Writes `summary.json` and returns what it holds."""
        summary = summarize(self.state, self._plan.targets) | {"seconds": round(self._clock() - self._started_s, 1)}
        self._run.write_json("summary.json", summary)
        return summary
