"""The recorder against a real embedded store: prompts, copies, repeats, seeds."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.config import ReviewConfig
from deploy.folder import RunFolder
from deploy.graph.events import ControlMeasured, SampleLeft
from deploy.graph.handles import PromptRefused, WorkerLost
from deploy.graph.recorder import Recorder
from deploy.graph.state import Group
from deploy.graph.tools import Rules, Seed, Tools
from evaluator.timing.statistics import PlacementHistory
from exemplar_store import ExemplarStore, RunStream
from exemplar_store.hacking_cases import HackingCases
from tasks.records import Candidate, Evaluation, Measurement, PolicyVersion, Prompt, Sample, Task

TASK = Task(id="file:abc", source="class Model: pass")
GROUP = Group("r1-g00000", TASK.id, "cpu", 3, 0)
SEEDS = (Seed("slow", "slow", "seed = 1"), Seed("fast", "fast", "seed = 2"))


class Bench:
    """A recorder with an evaluator that answers by the candidate's text."""

    def __init__(self, folder: Path) -> None:
        self.run = RunFolder(folder / "r1").create()
        self.store = ExemplarStore.connect(self.run.store)
        self.evaluated: list[str] = []
        self.answers: list[Any] = []
        """What the next evaluations give: a speedup, a whole evaluation, or an error; then always 1.5."""
        self.reproducer: dict[str, str] = {"seed": "ab12"}
        self.recorder = self.fresh()

    def fresh(self) -> Recorder:
        tools = Tools(self.build_prompt, lambda task: SEEDS, self.evaluate, build_turn=self.build_turn)
        rules = Rules(protocol="sequential", keep_samples=True, evaluators={"cpu": 2})
        return Recorder(self.run, self.store, {TASK.id: TASK}, tools, rules)

    def build_prompt(self, task: Task, exemplars: Any, mates: Any, group: Group) -> Prompt:
        return Prompt(
            id=group.id, run_id="r1", task_id=task.id, task_hash=task.content_hash, device_type="cpu", text="Go.",
            exemplar_hashes=tuple(e.candidate_hash for e in exemplars),
        )  # fmt: skip

    def build_turn(self, first: Prompt, history: Sequence[tuple[str, Evaluation]]) -> Prompt:
        told = [f"{text} {evaluation.outcome}" for text, evaluation in history]
        return first.model_copy(update={"text": " ".join(["Go.", *told]), "turn": len(history)})

    async def evaluate(
        self, task: Task, candidate: Candidate, device_type: str, protocol: str, first: Evaluation | None = None
    ) -> Evaluation:
        self.evaluated.append(candidate.source)
        speedup = 1.5
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, Evaluation):
                return answer
            speedup = answer
        common: dict[str, Any] = {
            "task_id": task.id, "task_hash": task.content_hash, "candidate_hash": candidate.content_hash,
            "protocol": protocol,
            "detail": {"evaluator": "cpu-0" if first is None else "cpu-1", **self.reproducer},
        }  # fmt: skip
        if "wrong" in candidate.source:
            return Evaluation(outcome="rejected", reason="incorrect", step="check", **common)
        if "lost" in candidate.source:
            return Evaluation(outcome="unscored", reason="device_fault", step="time", **common)
        if "huge" in candidate.source:
            return Evaluation(outcome="unscored", reason="too_large", step="load", **common)
        timing = Measurement(
            speedup=speedup, ci_low=speedup - 0.1, ci_high=speedup + 0.1, reference_ms=3, candidate_ms=2, pairs=20
        )
        return Evaluation(outcome="accepted", step="time", measurement=timing, **common)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.store.close()


def sample(index: int, text: str) -> Sample:
    candidate = None if text.startswith("?") else Candidate(source=text, origin="sample", detail=f"{GROUP.id}/{index}")
    return Sample(
        id=f"{GROUP.id}/{index}", prompt_id=GROUP.id, index=index, text=text, token_ids=(1, 2), logprobs=(-0.1, -0.2),
        policy_versions=(PolicyVersion(),), candidate=candidate,
    )  # fmt: skip


def test_one_group_by_hand(bench: Bench) -> None:
    """Seeds 1 and 2 are filed; three samples: a copy of seed 2, new work, no code: 2 accepted, 1 rejected. The copy is
    answered from the cache, and only the new kernel becomes an exemplar."""

    async def go() -> list[SampleLeft]:
        seeds = await bench.recorder.seed(TASK.id, "cpu")
        assert [(event.name, event.outcome, event.speedup) for event in seeds] == [
            ("slow", "accepted", 1.5), ("fast", "accepted", 1.5),
        ]  # fmt: skip
        await bench.recorder.open_group(GROUP)
        texts = ["seed = 2  # mine", "fresh = 1", "? sorry"]
        return [await bench.recorder.score(GROUP, sample(i, text), last=True) for i, text in enumerate(texts)]

    copy, new, unreadable = asyncio.run(go())
    assert (copy.outcome, copy.label) == ("accepted", "copy")
    assert (new.outcome, new.label, new.policy_version, new.new_tokens) == ("accepted", "new", "0.0", 2)
    assert (unreadable.outcome, unreadable.reason) == ("rejected", "contract")
    assert bench.evaluated == ["seed = 1", "seed = 2", "fresh = 1"]
    assert (bench.run.path / new.file).read_text() == "fresh = 1"
    kept = [json.loads(line) for line in (bench.run.path / "samples.jsonl").read_text().splitlines()]
    assert [(line["text"], line["outcome"], line["copy"]) for line in kept] == [
        ("seed = 2  # mine", "accepted", True), ("fresh = 1", "accepted", False), ("? sorry", "rejected", False),
    ]  # fmt: skip
    assert len(bench.store.top(TASK.content_hash, "cpu", 9)) == 3
    stream = RunStream(bench.store, "r1")
    stream.fence("learner")
    [(_, group)] = stream.read_scored("learner", 9, 0)
    assert [scored.edit_distance == 0.0 for scored in group.samples] == [bool(s.copy_of) for s in group.samples]
    assert stream.ledger() == {
        "dispatched": 3, "accepted": 2, "rejected": 1, "unscored": 0, "cancelled": 0, "in_flight": 0,
    }  # fmt: skip


def test_a_shown_exemplar_that_comes_back_is_a_copy_also_after_a_restart(bench: Bench) -> None:
    async def go() -> SampleLeft:
        await bench.recorder.seed(TASK.id, "cpu")
        prompt = await bench.recorder.open_group(GROUP)
        assert prompt.exemplar_hashes
        shown = next(
            source for _, _, source in SEEDS if Candidate(source=source).content_hash in prompt.exemplar_hashes
        )
        again = bench.fresh()
        assert await again.open_group(GROUP) == prompt
        await again.score(GROUP, sample(0, shown), last=True)
        return (await again.recorded(GROUP))[0]

    event = asyncio.run(go())
    assert event.label == "copy"
    assert event.edit_distance == 0.0


def test_a_prompt_may_show_another_kernel_of_the_bucket(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the drawn kernel is too long, one of its bucket stands in, and counts as shown: both seeds have 1.5x."""
    drawn: list[Any] = []

    def build_prompt(task: Task, exemplars: Any, mates: Any, group: Group) -> Prompt:
        drawn.append((exemplars, mates))
        return usual(task, mates[0], [], group)

    async def go() -> SampleLeft:
        await bench.recorder.seed(TASK.id, "cpu")
        await bench.recorder.open_group(GROUP)
        return await bench.recorder.score(GROUP, sample(0, mate_of(drawn)), last=True)

    def mate_of(drawn: list[Any]) -> str:
        [([exemplar], [[mate]])] = drawn
        assert {exemplar.source, mate.source} == {"seed = 1", "seed = 2"}
        return str(mate.source)

    usual = bench.build_prompt
    monkeypatch.setattr(bench, "build_prompt", build_prompt)
    bench.recorder = bench.fresh()
    event = asyncio.run(go())
    assert (event.label, event.edit_distance) == ("copy", 0.0)


def test_unscored_is_recorded_only_at_the_last_attempt(bench: Bench) -> None:
    async def go() -> list[int]:
        await bench.recorder.open_group(GROUP)
        counts = []
        for last in (False, True, True):
            await bench.recorder.score(GROUP, sample(0, "lost"), last=last)
            counts.append(len(await bench.recorder.recorded(GROUP)))
        return counts

    assert asyncio.run(go()) == [0, 1, 1]


def test_given_up_and_cancelled_samples_complete_the_group(bench: Bench) -> None:
    async def go() -> list[SampleLeft]:
        await bench.recorder.open_group(GROUP)
        await bench.recorder.give_up(GROUP, sample(0, "wrong"))
        await bench.recorder.cancel(GROUP, [1, 2])
        return await bench.recorder.recorded(GROUP)

    assert [event.outcome for event in asyncio.run(go())] == ["unscored", "cancelled", "cancelled"]


def test_a_task_too_large_for_its_seeds_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.recorder, "_tools", Tools(
        bench.build_prompt, lambda task: (Seed("one", "slow", "huge"),), bench.evaluate
    ))  # fmt: skip
    with pytest.raises(PromptRefused) as caught:
        asyncio.run(bench.recorder.seed(TASK.id, "cpu"))
    assert caught.value.reason == "too_large"


def test_a_confirmation_measures_the_file_by_the_full_protocol(bench: Bench) -> None:
    async def go() -> Any:
        await bench.recorder.open_group(GROUP)
        event = await bench.recorder.score(GROUP, sample(0, "fresh = 1"), last=True)
        return await bench.recorder.confirm(GROUP, event.sample_id)

    confirmed = asyncio.run(go())
    assert (confirmed.outcome, confirmed.ci_low) == ("accepted", 1.4)
    assert bench.evaluated == ["fresh = 1"] * 3, "scored, confirmed as a new best, confirmed in full"


@pytest.mark.parametrize(
    ("again", "outcome", "reason", "speedup"),
    [(2.1, "accepted", "", 2.1), (1.2, "accepted", "", 1.2), (3.0, "accepted", "", 2.0),
     (0.9, "rejected", "not_confirmed", 2.0)],
)  # fmt: skip
def test_the_full_protocol_is_held_against_the_record(
    bench: Bench, again: float, outcome: str, reason: str, speedup: float
) -> None:
    """Recorded at 2.0. In full 2.1 agrees and is shown, 1.2 is lower and scores, 3.0 is higher and does not, 0.9 is
    below half."""

    async def go() -> Any:
        await bench.recorder.open_group(GROUP)
        bench.answers = [2.0, 2.0, again]
        event = await bench.recorder.score(GROUP, sample(0, "fresh = 1"), last=True)
        return await bench.recorder.confirm(GROUP, event.sample_id)

    event = asyncio.run(go())
    assert (event.outcome, event.reason, event.speedup) == (outcome, reason, pytest.approx(speedup))


def lost(reason: str = "device_fault") -> Evaluation:
    return Evaluation(
        outcome="unscored", reason=reason, step="time", task_id=TASK.id, task_hash=TASK.content_hash, candidate_hash=""
    )  # fmt: skip


def wrong() -> Evaluation:
    return Evaluation(
        outcome="rejected", reason="caching", step="check", task_id=TASK.id, task_hash=TASK.content_hash,
        candidate_hash="", message="It replays.",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "asked", "outcome", "reason", "speedup"),
    [
        ([1.4], 1, "accepted", "", 1.4),
        ([2.0, 2.05], 2, "accepted", "", 2.0),
        ([2.0, 1.6], 2, "accepted", "", 1.6),
        ([2.0, 0.8], 2, "rejected", "not_confirmed", 2.0),
        ([2.0, wrong()], 2, "rejected", "caching", None),
        ([2.0, lost(), 2.0], 3, "accepted", "", 2.0),
        ([2.0, WorkerLost("gone"), 2.0], 3, "accepted", "", 2.0),
        ([2.0, WorkerLost("gone"), lost()], 3, "accepted", "", 2.0),
    ],
    ids=["no new best", "agrees", "lower", "below half", "a cheat", "lost once", "died once", "never came back"],
)
def test_a_new_best_is_measured_again(
    bench: Bench, answers: list[Any], asked: int, outcome: str, reason: str, speedup: float | None
) -> None:
    """The best seed has 1.5; what the sample is recorded and cached with is what stands after the second look."""

    async def go() -> tuple[SampleLeft, SampleLeft]:
        await bench.recorder.seed(TASK.id, "cpu")
        await bench.recorder.open_group(GROUP)
        bench.evaluated.clear()
        bench.answers = list(answers)
        first = await bench.recorder.score(GROUP, sample(0, "fresh = 1"), last=True)
        return first, await bench.recorder.score(GROUP, sample(1, "fresh = 1"), last=True)

    first, again = asyncio.run(go())
    assert (first.outcome, first.reason, first.speedup) == (outcome, reason, speedup)
    if reason != "caching":
        assert bench.evaluated == ["fresh = 1"] * asked, "the second sample is answered from the cache"
        assert (again.outcome, again.speedup) == (outcome, speedup)


class Scripted:
    """A reviewing model that says one thing after the other; an exception is raised, None never answers."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.questions: list[str] = []

    async def __call__(self, question: str) -> str:
        self.questions.append(question)
        answer = self.answers.pop(0)
        if answer is None:
            await asyncio.sleep(3600)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)


HONEST = '{"verdict": "honest", "family": "", "reason": "It fuses."}'
CHEAT = '{"verdict": "cheat", "family": "replay", "reason": "It keeps answers."}'


def reviewing(bench: Bench, reviewer: Scripted, **settings: Any) -> Recorder:
    tools = Tools(bench.build_prompt, lambda task: SEEDS, bench.evaluate, ask=reviewer)
    rules = Rules("sequential", review=ReviewConfig(mode="advisory", timeout_s=0.05).model_copy(update=settings))
    return Recorder(bench.run, bench.store, {TASK.id: TASK}, tools, rules)


def scored(recorder: Recorder, *texts: str) -> tuple[list[SampleLeft], list[Evaluation]]:
    """The events of samples with these texts, in the order given, and their evaluations as recorded."""

    async def go() -> list[SampleLeft]:
        await recorder.seed(TASK.id, "cpu")
        await recorder.open_group(GROUP)
        return [await recorder.score(GROUP, sample(i, text), last=True) for i, text in enumerate(texts)]

    events = asyncio.run(go())
    stream = RunStream(recorder._store, "r1")
    stream.fence("learner")
    [(_, group)] = stream.read_scored("learner", 9, 0)
    by_id = {one.sample.id: one.evaluation for one in group.samples if one.evaluation is not None}
    return events, [by_id[event.sample_id] for event in events]


def test_only_large_jumps_are_reviewed(bench: Bench) -> None:
    """The best seed has 1.5. A new best of 2.9 is below both thresholds, 3.1 above the second; with a factor of 1.5
    the 2.9 is above the first."""
    reviewer = Scripted(HONEST)
    bench.answers = [1.5, 1.5, 2.9, 2.9, 3.1, 3.1]
    events, evaluations = scored(reviewing(bench, reviewer), "one = 1", "two = 2", "? nothing")
    assert [event.review for event in events] == ["", "honest", ""]
    assert "reviewed_honest" in evaluations[1].labels
    (question,) = reviewer.questions
    assert "two = 2" in question
    assert TASK.source in question
    assert "best so far ran 2.90 times" in question
    assert question.count("--- BEGIN known cheat") == 3


def test_the_factor_of_a_jump_is_configured(bench: Bench) -> None:
    reviewer = Scripted(HONEST)
    bench.answers = [1.5, 1.5, 2.9, 2.9]
    events, _ = scored(reviewing(bench, reviewer, jump=1.5), "one = 1", "? nothing", "? nothing")
    assert [event.review for event in events] == ["honest", "", ""]


@pytest.mark.parametrize(("mode", "outcome", "reason"), [
    ("advisory", "accepted", None), ("binding", "rejected", "review"),
])  # fmt: skip
def test_a_cheat_by_the_reviewer_is_noted_or_binds(bench: Bench, mode: str, outcome: str, reason: str | None) -> None:
    """Binding, it becomes a hacking case and no exemplar; a second sample with the same code asks nobody again."""
    reviewer = Scripted(CHEAT)
    cases = HackingCases(bench.store)
    before = len(cases.all())
    bench.answers = [1.5, 1.5, 4.0, 4.0]
    events, evaluations = scored(reviewing(bench, reviewer, mode=mode), "one = 1", "one = 1  # again", "? nothing")
    assert [event.review for event in events] == ["cheat", "cheat", ""]
    for evaluation in evaluations[:2]:
        assert (evaluation.outcome, evaluation.reason) == (outcome, reason)
        assert evaluation.detail["review"]["family"] == "replay"
    found = [case for case in cases.all() if case.origin == f"r1: {GROUP.id}/0"]
    assert len(cases.all()) - before == len(found) == (mode == "binding")
    best = bench.store.best(TASK.content_hash, "cpu")
    assert best is not None
    assert (best.speedup == 4.0) is (mode == "advisory")


@pytest.mark.parametrize("mode", ["advisory", "binding"])
@pytest.mark.parametrize("answer", [None, ConnectionError("refused"), WorkerLost("gone")], ids=["late", "down", "died"])
def test_a_reviewer_that_fails_loses_no_sample(bench: Bench, mode: str, answer: Any) -> None:
    bench.answers = [1.5, 1.5, 4.0, 4.0]
    recorder = reviewing(bench, Scripted(answer), mode=mode)
    events, evaluations = scored(recorder, "one = 1", "? nothing", "? nothing")
    assert (events[0].outcome, events[0].review, events[0].speedup) == ("accepted", "failed", 4.0)
    assert "unreviewed" in evaluations[0].labels
    assert "It was not reviewed: " in evaluations[0].message


def test_junk_is_unsure_and_what_is_rejected_is_not_reviewed(bench: Bench) -> None:
    """The second sample is refuted by its confirmation, so that nobody is asked about it."""
    reviewer = Scripted("I cannot say.")
    bench.answers = [1.5, 1.5, 4.0, 4.0, 9.0, 1.0]
    events, _ = scored(reviewing(bench, reviewer, mode="binding"), "one = 1", "two = 2", "wrong = 3")
    assert [(event.outcome, event.review) for event in events] == [
        ("accepted", "unsure"), ("rejected", ""), ("rejected", ""),
    ]  # fmt: skip


def test_a_proven_cheat_becomes_a_hacking_case_without_a_reviewer(bench: Bench) -> None:
    """With the seed that shows it again; without one, and for a mistake, nothing is filed."""
    cases = HackingCases(bench.store)
    before = len(cases.all())
    proven = wrong().model_copy(update={"detail": {"seed": "ab12"}})
    mistake = proven.model_copy(update={"reason": "incorrect"})
    bench.answers = [1.5, 1.5, proven, wrong(), mistake]
    scored(bench.recorder, "cheat = {}", "other = []", "mistake = ()")
    (found,) = [case for case in cases.all() if case.origin.startswith("r1")]
    assert len(cases.all()) == before + 1
    assert (found.code, found.reason) == ("cheat = {}", "caching")
    assert "ab12" in found.explanation


def control(speedup: float = 1.0, sd: float = 0.0, number: int = 0) -> Evaluation:
    timing = Measurement(
        speedup=speedup, ci_low=speedup / 1.01, ci_high=speedup * 1.01, reference_ms=3, candidate_ms=3, pairs=20,
        placements=5,
    )  # fmt: skip
    return Evaluation(
        outcome="accepted", step="time", measurement=timing, task_id=TASK.id, task_hash=TASK.content_hash,
        candidate_hash="", facts={"placement_sd_log": sd}, detail={"seed": str(number), "evaluator": "cpu-1"},
    )  # fmt: skip


def test_controls_are_kept_told_and_raise_an_alarm(bench: Bench) -> None:
    """Fifty controls of 1.03x in two lives of the recorder: the alarm comes with the fiftieth, and the evaluators know
    the placements from the first on, also after a restart."""
    told: list[PlacementHistory | None] = []
    due = [None, *(control(1.03, 0.01, n) for n in range(50)), lost()]

    async def next_control(task: Task, device_type: str, protocol: str) -> Evaluation | None:
        assert (task, device_type, protocol) == (TASK, "cpu", "sequential")
        return due.pop(0)

    def recorder() -> Recorder:
        tools = Tools(bench.build_prompt, lambda task: (), bench.evaluate, next_control, lambda _, h: told.append(h))
        return Recorder(bench.run, bench.store, {TASK.id: TASK}, tools, Rules("sequential", evaluators={"cpu": 1}))

    def controls(one: Recorder, count: int) -> list[ControlMeasured | None]:
        async def go() -> list[ControlMeasured | None]:
            return [await one.control(TASK.id, "cpu") for _ in range(count)]

        return asyncio.run(go())

    first = recorder()
    assert told == [None]
    nothing, *events = controls(first, 31)
    assert nothing is None
    assert told[1] == PlacementHistory(pytest.approx(1e-4), 4)
    events += controls(recorder(), 21)
    assert told[31].degrees == told[32].degrees - 4 == 30 * 4  # type: ignore[union-attr]
    assert [event.measured for event in events if event is not None] == [*range(1, 51), 50]
    assert [bool(event.alarm) for event in events if event is not None] == [False] * 49 + [True] * 2
    newest, failed = events[49], events[50]
    assert newest is not None
    assert failed is not None
    assert (newest.evaluator, newest.coverage, newest.bias_log) == ("cpu-1", 0.0, pytest.approx(math.log(1.03)))
    assert (failed.outcome, failed.failed, failed.speedup) == ("unscored", 1, None)


def test_a_seed_that_is_unscored_is_tried_once_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.recorder, "_tools", Tools(
        bench.build_prompt, lambda task: (Seed("one", "slow", "lost"),), bench.evaluate
    ))  # fmt: skip
    [event] = asyncio.run(bench.recorder.seed(TASK.id, "cpu"))
    assert event.outcome == "unscored"
    assert bench.evaluated == ["lost", "lost"]


def test_one_seed_of_each_speed(bench: Bench) -> None:
    """Of three seeds of two speeds, one slow and the only fast one are evaluated; the same ones each time."""
    seeds = (Seed("a", "slow", "a = 1"), Seed("b", "slow", "b = 1"), Seed("c", "fast", "c = 1"))
    tools = Tools(bench.build_prompt, lambda task: seeds, bench.evaluate)
    names = []
    for _ in range(2):
        recorder = Recorder(
            bench.run, bench.store, {TASK.id: TASK}, tools, Rules("sequential", one_seed_per_speed=True)
        )
        names.append([event.name for event in asyncio.run(recorder.seed(TASK.id, "cpu"))])
    assert names[0] == names[1]
    assert sorted(names[0]) in (["a", "c"], ["b", "c"])


def test_a_later_turn_is_asked_with_its_own_conversation(bench: Bench) -> None:
    """Group of 2 conversations of 3 turns. The third turn of conversation 0 knows what its first two came to, also
    after a restart of the recorder; conversation 1 does not show through."""
    group = Group("r1-g00000", TASK.id, "cpu", 6, 0, turns=3)

    async def go() -> list[Prompt]:
        await bench.recorder.open_group(group)
        texts = ["wrong 1", "fresh = 1", "better = 2"]
        for index, text in enumerate(texts):
            await bench.recorder.score(group, sample(index, text), last=True)
        return [await recorder.turn_prompt(group, 4) for recorder in (bench.recorder, bench.fresh())]

    for prompt in asyncio.run(go()):
        assert (prompt.text, prompt.turn, prompt.id) == ("Go. wrong 1 rejected better = 2 accepted", 2, group.id)


def test_an_own_earlier_answer_said_again_is_a_copy(bench: Bench) -> None:
    """Its prompt shows it with its speedup. The other conversation has not seen it, and what was
    wrong is wrong again."""
    group = Group("r1-g00000", TASK.id, "cpu", 6, 0, turns=2)

    async def go() -> list[SampleLeft]:
        await bench.recorder.open_group(group)
        texts = ["fresh = 1", "other = 1", "wrong 1", "fresh = 1  # again", "fresh = 1", "wrong 1"]
        return [await bench.recorder.score(group, sample(i, text), last=True) for i, text in enumerate(texts)]

    left = asyncio.run(go())
    assert [event.label for event in left] == ["new", "new", "", "copy", "new", ""]
    assert [event.edit_distance for event in left[3:4]] == [0.0]
    standing = RunStream(bench.store, "r1").group(group.id, TASK.content_hash)
    assert standing is not None
    copies = {scored.sample.index for scored in standing.samples if scored.copy_of}
    assert copies == {3}
