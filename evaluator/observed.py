"""Collects what is observed of one candidate while it is evaluated, and makes the judge's `Facts` of it.

Invariant: things are only added; `facts()` can be asked for at any time, so that the first proven fault ends an
evaluation early.
"""

from __future__ import annotations

from typing import Any

from evaluator.activity import Activity
from evaluator.compile.diagnostics import cut
from evaluator.judgement import CallLedger, CallResult, Facts
from evaluator.judgement.defences.state_growth import MemoryLog
from evaluator.judgement.facts import (
    Alias,
    CompileFacts,
    Confirmation,
    Degenerate,
    Determinism,
    Ending,
    ExpectedLeaf,
    GlobalState,
    Growth,
    Infrastructure,
    LeafFacts,
    OutputFacts,
    OwnWork,
    Pending,
    ScreenFacts,
    TimerFacts,
)
from evaluator.timing.record import TurnRecord
from evaluator.worker import schema
from tasks.records import Measurement
from tasks.records.evaluation import Step

_MANY = 16


class Observed:
    """Mutable facts of one candidate; `activity` is what its evaluator does."""

    def __init__(self, activity: Activity | None = None) -> None:
        self.activity = activity or Activity()
        self.step: Step = "screen"
        self.version = 0
        self.screen = ScreenFacts()
        self.compile = CompileFacts()
        self.ending: Ending | None = None
        self.channel_error = ""
        self.parameters: Any = "loaded"
        self.parameters_missing: tuple[str, ...] = ()
        self.parameter_mismatch: tuple[str, ...] = ()
        self.ledger = CallLedger()
        self.determinism = Determinism()
        self.degenerate = Degenerate()
        self.growth = Growth()
        self.pending = Pending()
        self.timers = TimerFacts()
        self.own_work = OwnWork()
        self.global_state = GlobalState()
        self.measurement: Measurement | None = None
        self.span_limited = False
        self.unstable = ""
        self.placement_sd_log = 0.0
        self.confirmation: Confirmation | None = None
        self.infrastructure: Infrastructure | None = None
        self.random_reference = False
        self.turns = TurnRecord()
        self._outputs: dict[str, OutputFacts] = {}
        self._aliases: dict[str, Alias] = {}
        self._inputs_changed: set[str] = set()
        self._guards_broken: set[str] = set()
        self._buffers_wrong: set[str] = set()
        self._expected: tuple[ExpectedLeaf, ...] = ()
        self._expected_structure = "tensor"
        self._reference_aliases: set[tuple[str, str]] = set()
        self._seen_together = False
        self._memory = MemoryLog()
        self._base_device: int | None = None

    def news(self) -> None:
        """Something was added that may decide."""
        self.version += 1

    def bytes_per_call(self, count: int) -> None:
        """Inputs and outputs of one call, which growth is measured by."""
        self.growth = self.growth.model_copy(update={"bytes_per_call": count})

    def measured_speedup(self) -> float:
        """The speedup so far; 0 without a measurement."""
        return self.measurement.speedup if self.measurement is not None else 0.0

    def inspected(self, answer: schema.Inspected) -> None:
        """What the candidate has changed in its process so far."""
        self.global_state = GlobalState(replaced=tuple(answer.replaced), settings=tuple(answer.settings))
        self.own_work = self.own_work.model_copy(update={"compilers": tuple(answer.compilers)})
        self.compile = self.compile.model_copy(update={"routes": tuple(answer.programs)})
        self.news()

    def traced(self, answer: schema.Traced) -> None:
        """What calls under a tracer showed."""
        update = answer.model_dump(exclude={"op"}) | {"swallowed": tuple(answer.swallowed)}
        self.own_work = self.own_work.model_copy(update=update)
        self.news()

    def processes_left(self, count: int) -> None:
        """Processes of the candidate that were alive between calls."""
        if count > self.pending.processes:
            self.pending = self.pending.model_copy(update={"processes": count})
            self.news()

    def end(self, kind: Any, detail: str) -> None:
        """The worker ended in the step of now; only the first ending counts. A hang says what hung."""
        now = self.activity.now
        if kind == "deadline" and now is not None:
            detail += f" ({now.words})"
        if self.ending is None:
            self.ending = Ending(kind=kind, step=self.step, detail=detail[:1000])

    def buffers(self, wrong: set[str]) -> None:
        """Buffers that differ after the same calls."""
        if wrong:
            self._buffers_wrong |= set(sorted(wrong)[:_MANY])
            self.news()

    def build_failed(self, text: str) -> None:
        """A build that the candidate could not be loaded without failed."""
        self.compile = self.compile.model_copy(update={"failed": True, "error": cut(text)})
        self.news()

    def reference_ran(self, results: list[schema.Result]) -> None:
        """Describes the reference's own output, to compare the candidate's with."""
        self._seen_together = self._seen_together or len(results) > 1
        keys = {"path", "device", "dtype", "shape"}
        self._expected = tuple(ExpectedLeaf(**leaf.model_dump(include=keys)) for leaf in results[0].leaves)
        self._expected_structure = results[0].structure
        self._reference_aliases |= {(alias.target, alias.path) for result in results for alias in result.aliases}

    @property
    def given_again(self) -> list[str] | None:
        """Paths at which the reference hands out memory that it keeps; None while no two results were seen together."""
        if not self._seen_together:
            return None
        return sorted(path for target, path in self._reference_aliases if target == "earlier_output")

    def compared(self, calls: list[CallResult | None], results: list[schema.Result], verdict: dict[str, Any]) -> None:
        """Adds one compared burst."""
        before = len(self._outputs), len(self._aliases), len(self._inputs_changed), len(self._guards_broken)
        for call in calls:
            if call is not None:
                self.ledger.add(call)
        for result in results:
            self._add_output(result)
            for alias in result.aliases:
                self._add_alias(alias)
        self._inputs_changed |= set(verdict["inputs_changed"])
        self._guards_broken |= set(verdict["guards_broken"][:_MANY])
        after = len(self._outputs), len(self._aliases), len(self._inputs_changed), len(self._guards_broken)
        if before != after or any(call is None or call.aspects for call in calls):
            self.news()

    def _add_output(self, result: schema.Result) -> None:
        key = result.model_dump_json(exclude={"aliases"})
        known = self._outputs.get(key)
        if known is not None:
            self._outputs[key] = known.model_copy(update={"calls": known.calls + 1})
        elif len(self._outputs) < _MANY:
            leaves = tuple(LeafFacts(**leaf.model_dump()) for leaf in result.leaves)
            self._outputs[key] = OutputFacts(
                structure=result.structure,
                expected_structure=self._expected_structure,
                leaves=leaves,
                expected=self._expected,
            )

    @property
    def gives_memory_again(self) -> bool:
        """Whether a result lay in the memory of an earlier one that its caller still held."""
        return any(alias.target == "earlier_output" and not alias.reference_too for alias in self._aliases.values())

    def _add_alias(self, overlap: schema.Overlap) -> None:
        too = (overlap.target, overlap.path) in self._reference_aliases
        alias = Alias(target=overlap.target, path=overlap.path, other=overlap.other, reference_too=too)
        if len(self._aliases) < _MANY:
            self._aliases[alias.model_dump_json()] = alias

    def memory(self, rss_bytes: int, calls: int) -> None:
        """Private memory of the worker after `calls` more calls; the first reading is the base."""
        self._memory.add(rss_bytes, calls)
        grown = max(self.growth.host_bytes, self._memory.grown_bytes)
        if grown > self.growth.bytes_per_call:
            self.news()
        self.growth = self.growth.model_copy(
            update={
                "host_bytes": grown,
                "calls": self._memory.calls,
                "still_growing": self._memory.still_growing,
            }
        )

    def device_memory(self, candidate_bytes: int, reference_bytes: int) -> None:
        """Device memory of both workers; what both have more of (arenas, the driver's own) is no growth."""
        if not candidate_bytes or not reference_bytes:
            return
        more = candidate_bytes - reference_bytes
        if self._base_device is None:
            self._base_device = more
        grown = max(self.growth.device_bytes, more - self._base_device)
        if grown > self.growth.device_bytes + (16 << 20):
            self.news()
        self.growth = self.growth.model_copy(update={"device_bytes": grown})

    def facts(self) -> Facts:
        """Everything observed so far."""
        return Facts(
            step=self.step, screen=self.screen, compile=self.compile, ending=self.ending,
            channel_error=self.channel_error, parameters=self.parameters,
            parameters_missing=self.parameters_missing, outputs=tuple(self._outputs.values()),
            aliases=tuple(self._aliases.values()), inputs_changed=tuple(sorted(self._inputs_changed)),
            buffers_wrong=tuple(sorted(self._buffers_wrong)), guards_broken=tuple(sorted(self._guards_broken)),
            draws=self.ledger.tallies(), determinism=self.determinism, degenerate=self.degenerate, growth=self.growth,
            pending=self.pending, timers=self.timers, own_work=self.own_work, global_state=self.global_state,
            measurement=self.measurement, span_limited=self.span_limited, unstable=self.unstable,
            placement_sd_log=self.placement_sd_log, confirmation=self.confirmation, infrastructure=self.infrastructure,
            random_reference=self.random_reference,
        )  # fmt: skip
