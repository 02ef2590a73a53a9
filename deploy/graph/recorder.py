"""One run's dealings with the store: prompts, samples, seed kernels, controls; no Ray in here.

What stands of an evaluation is the affair of `deploy.graph.verdicts`.

Invariants: every method may be repeated with the same ids; a sample is recorded once, with whatever evaluation came
first; a kernel file is written before its sample is recorded, so that what the store calls accepted can be read; only
kernels that are no copies and measure no held-out set become exemplars.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from deploy.folder import RunFolder, kernel_file
from deploy.graph.evaluators import evaluator_of
from deploy.graph.events import ControlMeasured, KernelConfirmed, SampleLeft, SeedEvaluated
from deploy.graph.handles import PromptRefused
from deploy.graph.ledger import sample_id
from deploy.graph.state import Group
from deploy.graph.tools import Rules, Seed, Tools
from deploy.graph.verdicts import StoreThread, Verdicts, score_of
from evaluator.timing.controls import WINDOW, health, history_of
from evaluator.timing.statistics import PlacementHistory
from exemplar_store import ExemplarStore, RunStream
from exemplar_store.controls import Controls
from rollout import parse_completion
from rollout.novelty import copy_of, nearest_distance
from tasks.records import Candidate, Evaluation, Exemplar, Prompt, Sample, ScoredSample, Task
from tasks.records.evaluation import Protocol as TimingProtocol

_log = logging.getLogger(__name__)
REFUSING = ("reference_failed", "too_large")
"""Unscored reasons that say something about the task, not about the candidate or the machine."""
UNREADABLE = {
    "no_code": "The completion holds no code block.",
    "truncated": "The completion reached the token limit before its code ended.",
    "too_large": "The completion or its code is too large to be read.",
    "not_text": "The completion is not valid text.",
}
"""What is said of a completion without a candidate, by the parser's finding."""


class Recorder:
    """See the module's text. One per process; its methods may run at the same time."""

    def __init__(
        self, run: RunFolder, store: ExemplarStore, tasks: Mapping[str, Task], tools: Tools, rules: Rules
    ) -> None:
        self._run = run
        self._store = store
        self._held_out_pool = ExemplarStore(store.connection, store.config.model_copy(update={"strategy": "buckets"}))
        self._stream = RunStream(store, run.run_id)
        self._controls = Controls(store)
        self._tasks = dict(tasks)
        self._tools = tools
        self._rules = rules
        self._shown: dict[str, dict[str, str]] = {}
        self._seeds: dict[str, set[str]] = {}
        self._in_store = StoreThread()
        self._verdicts = Verdicts(run.run_id, store, self._in_store, tools.evaluate, tools.ask, rules)
        for device_type in rules.evaluators:
            tools.tell(device_type, self._history(device_type))

    async def open_group(self, group: Group) -> Prompt:
        """The group's prompt, opened in the store; the same prompt when it was open already."""
        standing = await self._in_store(self._stream.group, group.id, self._task(group).content_hash)
        if standing is not None:
            return standing.prompt
        task = self._task(group)
        # A held-out prompt is the same at every step and for every seed, and by the same strategy in every run.
        store = self._held_out_pool if group.held_out else self._store
        rng = random.Random(f"{group.held_out}/{task.id}" if group.held_out else f"{self._rules.seed}/{group.id}")
        exemplars: list[Exemplar] = []
        if group.exemplars:
            exemplars = await self._in_store(
                store.draw, task.content_hash, group.device_type, rng, self._rules.exemplars
            )
        mates = [await self._in_store(store.bucket_mates, exemplar) for exemplar in exemplars]
        prompt = self._tools.build_prompt(task, exemplars, mates, group)
        if group.held_out:
            prompt = prompt.model_copy(update={"held_out": group.held_out, "turns": 1, "messages": ()})
        known = itertools.chain(exemplars, *mates)
        sources = {exemplar.candidate_hash: exemplar.source for exemplar in known}
        self._shown[group.id] = {name: sources[name] for name in prompt.exemplar_hashes if name in sources}
        await self._in_store(self._store.put_task, task)
        await self._in_store(self._stream.open_group, prompt, group.size)
        return prompt

    async def turn_prompt(self, group: Group, index: int) -> Prompt:
        """The prompt of a sample of a later turn, by what its conversation has on record."""
        first = await self.open_group(group)
        return self._tools.build_turn(first, [
            (scored.sample.text, scored.evaluation)
            for scored in await self._conversation(group, index) if scored.evaluation is not None
        ])  # fmt: skip

    async def _conversation(self, group: Group, index: int) -> list[ScoredSample]:
        """What is on record of the turns before a sample, oldest first."""
        earlier = range(index % group.width, index, group.width)
        if not earlier:
            return []
        standing = await self._in_store(self._stream.group, group.id, self._task(group).content_hash)
        found = {} if standing is None else {scored.sample.index: scored for scored in standing.samples}
        return [found[turn] for turn in earlier if turn in found]

    async def recorded(self, group: Group) -> list[SampleLeft]:
        """Events for the samples of a group that are on record."""
        standing = await self._in_store(self._stream.group, group.id, self._task(group).content_hash)
        return [] if standing is None else [self._event(group, scored) for scored in standing.samples]

    async def cancel(self, group: Group, indices: Sequence[int]) -> None:
        """Samples leave unevaluated."""
        await self._in_store(self._stream.cancel, [sample_id(group.id, index) for index in indices])
        await self._in_store(self._stream.relay)

    async def score(self, group: Group, sample: Sample, *, last: bool) -> SampleLeft:
        """Evaluates and records one sample; see `handles.Scorers.score`."""
        task = self._task(group)
        if sample.candidate is None:
            evaluation = self._unreadable(group, task, sample)
        else:
            evaluation = await self._verdicts.of(task, sample.candidate, group.device_type, settle=True)
        if evaluation.outcome == "unscored" and not last:
            return self._event(group, ScoredSample(sample=sample, evaluation=evaluation))
        return await self._record(group, sample, evaluation)

    async def give_up(self, group: Group, sample: Sample) -> SampleLeft:
        """Records one sample as unscored, because no evaluator lived long enough."""
        task = self._task(group)
        evaluation = Evaluation(
            outcome="unscored", reason="evaluator_lost", step="load", message="Every evaluator asked was lost.",
            task_id=task.id, task_hash=task.content_hash, device_type=group.device_type,
            candidate_hash=sample.candidate.content_hash if sample.candidate else "", precision=task.precision,
        )  # fmt: skip
        return await self._record(group, sample, evaluation)

    async def confirm(self, group: Group, identifier: str) -> KernelConfirmed:
        """Measures an accepted kernel again from its file, by the full protocol."""
        source = (self._run.path / kernel_file(group.task_id, identifier)).read_text()
        candidate, task = Candidate(source=source, origin="sample", detail=identifier), self._task(group)
        stands = await self._verdicts.in_full(task, candidate, group.device_type)
        return KernelConfirmed(
            task_id=group.task_id, sample_id=identifier, outcome=stands.outcome, reason=stands.reason or "",
            **_figures(stands),
        )  # fmt: skip

    async def seed(self, task_id: str, device_type: str) -> list[SeedEvaluated]:
        """Evaluates a task's seed kernels and files the accepted ones; raises PromptRefused for a task that fails."""
        task, events = self._tasks[task_id], []
        for name, _, source in self._chosen_seeds(task):
            candidate = Candidate(source=source, origin="seed", detail=name)
            evaluation = await self._verdicts.of(task, candidate, device_type)
            if evaluation.outcome == "unscored":  # once more, since a crowded machine can be the cause
                evaluation = await self._verdicts.of(task, candidate, device_type)
            if evaluation.reason in REFUSING:
                raise PromptRefused(str(evaluation.reason), evaluation.message)
            if evaluation.outcome == "accepted":
                await self._in_store(self._store.insert, self._exemplar(task, candidate, evaluation))
            events.append(
                SeedEvaluated(
                    task_id=task_id, device_type=device_type, name=name, outcome=evaluation.outcome,
                    reason=evaluation.reason or "", **_figures(evaluation),
                )
            )  # fmt: skip
        return events

    async def control(self, task_id: str, device_type: str) -> ControlMeasured | None:
        """Has a reference measured against itself where that is due, keeps it, and says how its device type stands."""
        task, protocol = self._tasks[task_id], self._rules.protocol
        evaluation = await self._tools.control(task, device_type, protocol)
        if evaluation is None:
            return None
        await self._in_store(self._controls.add, evaluation, time.time())
        known = await self._in_store(self._controls.newest, device_type, protocol, WINDOW)
        self._tools.tell(device_type, await self._in_store(self._history, device_type))
        measurement = evaluation.measurement
        return ControlMeasured(
            device_type=device_type, protocol=protocol, task_id=task_id, evaluator=evaluator_of(evaluation),
            outcome=evaluation.outcome, reason=evaluation.reason or "",
            speedup=None if measurement is None else measurement.speedup,
            ci_low=None if measurement is None else measurement.ci_low,
            ci_high=None if measurement is None else measurement.ci_high,
            **asdict(health(known, max_bias=self._rules.max_bias)),
        )  # fmt: skip

    def _history(self, device_type: str) -> PlacementHistory | None:
        """What all controls of a device type show of placements, whatever their protocol."""
        found = [self._controls.newest(device_type, protocol, WINDOW) for protocol in get_args(TimingProtocol)]
        return history_of(itertools.chain(*found))

    def _chosen_seeds(self, task: Task) -> list[Seed]:
        seeds = list(self._tools.seed_kernels(task))
        if not self._rules.one_seed_per_speed:
            return seeds
        rng = random.Random(f"{self._rules.seed}/{task.content_hash}")
        return [
            rng.choice([seed for seed in seeds if seed.speed == speed])
            for speed in dict.fromkeys(s.speed for s in seeds)
        ]

    def _task(self, group: Group) -> Task:
        return self._tasks[group.task_id]

    async def _record(self, group: Group, sample: Sample, evaluation: Evaluation) -> SampleLeft:
        copied, distance = "", None
        if sample.candidate is not None:
            shown = {**await self._shown_to(group), **await self._own_earlier(group, sample.index)}
            copied = copy_of(sample.candidate.source, shown)
            distance = 0.0 if copied else nearest_distance(sample.candidate.source, filter(None, shown.values()))
        scored = ScoredSample(sample=sample, evaluation=evaluation, copy_of=copied, edit_distance=distance)
        exemplar = None
        if evaluation.outcome == "accepted" and sample.candidate is not None:
            self._run.write_text(kernel_file(group.task_id, sample.id), sample.candidate.source)
            if not copied and not group.held_out:
                exemplar = self._exemplar(self._task(group), sample.candidate, evaluation)
        progress = await self._in_store(self._stream.record, scored, exemplar)
        if progress.recorded and self._rules.keep_samples:
            self._keep(group, scored)
        if progress.complete:
            await self._in_store(self._stream.relay)
        return self._event(group, scored)

    def _keep(self, group: Group, scored: ScoredSample) -> None:
        """A copy for people; the store's own record is what counts."""
        evaluation = scored.evaluation
        line = {
            "sample": scored.sample.id, "task": group.task_id, "finish_reason": scored.sample.finish_reason,
            "tokens": len(scored.sample.token_ids), "copy": bool(scored.copy_of), "text": scored.sample.text,
            **({} if evaluation is None else {"outcome": evaluation.outcome, "reason": evaluation.reason,
                                             "message": evaluation.message, **_figures(evaluation)}),
        }  # fmt: skip
        with (self._run.path / "samples.jsonl").open("a") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")

    async def _shown_to(self, group: Group) -> dict[str, str]:
        """Exemplars of the group's prompt; after a restart their hashes only, which still tell a copy."""
        if group.id not in self._shown:
            standing = await self._in_store(self._stream.group, group.id, self._task(group).content_hash)
            self._shown[group.id] = dict.fromkeys(standing.prompt.exemplar_hashes, "") if standing else {}
        return self._shown[group.id]

    async def _own_earlier(self, group: Group, index: int) -> dict[str, str]:
        """Accepted kernels of the sample's own earlier turns: its prompt shows them with their speedups."""
        return {
            scored.sample.candidate.content_hash: scored.sample.candidate.source
            for scored in await self._conversation(group, index)
            if scored.sample.candidate is not None and scored.evaluation is not None
            and scored.evaluation.outcome == "accepted"
        }  # fmt: skip

    def _exemplar(self, task: Task, candidate: Candidate, evaluation: Evaluation) -> Exemplar:
        measurement = evaluation.measurement
        if measurement is None:
            raise ValueError(f"{candidate.detail} is accepted without a measurement")
        return Exemplar(
            task_id=task.id, task_hash=task.content_hash, device_type=evaluation.device_type,
            precision=evaluation.precision, source=candidate.source, candidate_hash=candidate.content_hash,
            speedup=score_of(measurement), measurement=measurement, labels=evaluation.labels, origin=candidate.detail,
        )  # fmt: skip

    def _unreadable(self, group: Group, task: Task, sample: Sample) -> Evaluation:
        problem = parse_completion(sample.text, cut=sample.finish_reason == "length").error or "no_code"
        return Evaluation(
            outcome="rejected", reason="contract", step="screen", message=UNREADABLE[problem],
            task_id=task.id, task_hash=task.content_hash, candidate_hash="", device_type=group.device_type,
            precision=task.precision,
        )  # fmt: skip

    def _event(self, group: Group, scored: ScoredSample) -> SampleLeft:
        sample, evaluation = scored.sample, scored.evaluation
        accepted = evaluation is not None and evaluation.outcome == "accepted"
        label: Any = ""
        if accepted and sample.candidate is not None:
            known = scored.copy_of or sample.candidate.content_hash in self._seed_hashes(group.task_id)
            label = "copy" if known else "new"
        return SampleLeft(
            sample_id=sample.id, group_id=group.id,
            outcome="cancelled" if evaluation is None else evaluation.outcome,
            reason="" if evaluation is None else evaluation.reason or "",
            label=label,
            policy_version=str(min(sample.policy_versions)) if sample.policy_versions else "",
            edit_distance=scored.edit_distance,
            file=kernel_file(group.task_id, sample.id) if accepted else "",
            new_tokens=len(sample.token_ids),
            candidate_hash="" if sample.candidate is None else sample.candidate.content_hash,
            review=_review_of(evaluation),
            **({} if evaluation is None else _figures(evaluation)),
        )  # fmt: skip

    def _seed_hashes(self, task_id: str) -> set[str]:
        if task_id not in self._seeds:
            kernels = self._tools.seed_kernels(self._tasks[task_id])
            self._seeds[task_id] = {Candidate(source=seed.source).content_hash for seed in kernels}
        return self._seeds[task_id]


def _review_of(evaluation: Evaluation | None) -> Any:
    """How the event of a sample names its review."""
    note = evaluation.detail.get("review") if evaluation is not None else None
    return "" if not isinstance(note, dict) else note.get("verdict", "failed")


def _figures(evaluation: Evaluation) -> dict[str, Any]:
    measurement = evaluation.measurement
    if measurement is None:
        return {}
    return {
        "speedup": measurement.speedup,
        "ci_low": measurement.ci_low,
        "ci_high": measurement.ci_high,
        "reference_ms": measurement.reference_ms,
    }
