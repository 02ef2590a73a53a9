"""Augmentation: what is asked, judged and kept, and what a kill leaves of it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.augment.augmenter import Augmenter, Imported
from deploy.augment.imports import read_set
from deploy.augment.journal import Answered, Entry, Journal, JournalError, Skipped
from deploy.augment.state import AugmentState, summarize
from deploy.augment.teachers import Answer, TeacherLost, TeacherRefused
from deploy.config import AugmentConfig
from deploy.graph.handles import WaitedTooLong, WorkerLost
from rollout import render_completion
from tasks.errors import UsageError
from tasks.records import Candidate, Demonstration, Evaluation, Measurement, Task

REFERENCE = "class Model: pass\ndef get_inputs(): return []\ndef get_init_inputs(): return []\n"
TASKS = [Task(id=f"t/{n}", source=f"{REFERENCE}SIZE = {n}\n") for n in range(3)]


class Killed(Exception):
    """The process is gone."""


def evaluation(task: Task, candidate: Candidate, word: str) -> Evaluation:
    """What a word in a kernel's name asks for: good, slow, wrong, lost, or impossible (the task's own fault)."""
    common: dict[str, Any] = {
        "task_id": task.id, "task_hash": task.content_hash, "candidate_hash": candidate.content_hash, "step": "time",
    }  # fmt: skip
    if word in ("good", "slow"):
        speedup = 2.0 if word == "good" else 0.5
        measurement = Measurement(
            speedup=speedup, ci_low=speedup - 0.1, ci_high=speedup, reference_ms=speedup, candidate_ms=1, pairs=20
        )
        return Evaluation(outcome="accepted", measurement=measurement, **common)
    reason = {"wrong": "incorrect", "lost": "device_fault", "impossible": "reference_failed"}[word]
    return Evaluation(outcome="rejected" if word == "wrong" else "unscored", reason=reason, message=word, **common)


def kernel(word: str, number: int = 0) -> str:
    return f"class ModelNew:\n    kind = {word!r}\n    number = {number}"


class ScriptedTeacher:
    """Answers by a script of words, the same for every task; counts how often each attempt was asked for.

    Kernels without a number of their own are numbered by attempt, from `first` on.
    """

    def __init__(self, words: Sequence[str], asked: Counter[tuple[str, int]] | None = None, *, first: int = 0) -> None:
        self.tasks_at_once = 2
        self.words = words
        self.first = first
        self.asked: Counter[tuple[str, int]] = Counter() if asked is None else asked

    async def ask(self, task: Task, index: int) -> Answer:
        await asyncio.sleep(0)
        self.asked[task.id, index] += 1
        word = self.words[index % len(self.words)]
        if word == "gone":
            raise TeacherLost("the endpoint is gone")
        if word == "refuse":
            raise TeacherRefused("too long")
        name, _, number = word.partition("-")
        text = (
            "Sorry."
            if name == "prose"
            else render_completion("Why.", "How.", kernel(name, int(number or self.first + index)))
        )
        return Answer(text, "stop", 100, 10, 0.5, 1.0)

    async def close(self) -> None:
        return None


class Bench:
    """Evaluates by the word in the kernel, and remembers what it was given."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()
        self.lose = 0

    async def evaluate(self, task: Task, candidate: Candidate) -> Evaluation:
        await asyncio.sleep(0)
        self.seen[task.id, candidate.content_hash] += 1
        if self.lose:
            self.lose -= 1
            raise WaitedTooLong("it took too long") if self.lose % 2 else WorkerLost("the evaluator died")
        return evaluation(task, candidate, candidate.source.split("'")[1])


def augmented(
    teachers: dict[str, Any], bench: Bench, *, entries: list[Entry] | None = None, tasks: Sequence[Task] = TASKS,
    imports: Sequence[Imported] = (), **config: Any,
) -> Augmenter:  # fmt: skip
    """Runs to the end; entries go to the list."""
    stored: list[Entry] = [] if entries is None else entries
    augmenter = Augmenter(
        tasks, teachers, bench.evaluate, AugmentConfig(**config), AugmentState.replay(stored), stored.append,
        device_type="cpu",
    )  # fmt: skip
    asyncio.run(augmenter.run(imports))
    return augmenter


def test_a_teacher_stops_at_two_successes_and_at_twenty_attempts() -> None:
    quick, slow = ScriptedTeacher(["wrong", "good"]), ScriptedTeacher(["wrong"])
    augmenter = augmented({"quick": quick, "slow": slow}, Bench())
    assert {index for _, index in quick.asked} == {0, 1, 2, 3}
    assert {index for _, index in slow.asked} == set(range(20))
    assert max((quick.asked + slow.asked).values()) == 2, "each teacher is asked for each attempt once"
    kept = augmenter.state.demonstrations()
    assert [(one.teacher, one.task.id) for one in kept] == [("quick", t.id) for t in sorted_by_hash() for _ in "12"]
    assert (kept[0].analysis, kept[0].design, kept[0].measurement.speedup) == ("Why.", "How.", 2.0)
    figures = summarize(augmenter.state, TASKS)
    assert (figures["tasks_with_success"], figures["kept"], figures["cost"]) == (3, 6, 0.5 * (12 + 60))
    assert figures["teachers"]["slow"]["verdicts"] == {"rejected": 60}
    assert figures["teachers"]["slow"]["reasons"] == {"incorrect": 60}
    assert figures["teachers"]["quick"]["prompt_tokens"] == 1200


def sorted_by_hash() -> list[Task]:
    return sorted(TASKS, key=lambda task: task.content_hash)


def test_equal_kernels_of_a_task_are_evaluated_once_and_kept_once() -> None:
    bench = Bench()
    first, second = ScriptedTeacher(["good-7"]), ScriptedTeacher(["good-7", "good-8", "good-9"])
    augmenter = augmented({"first": first, "second": second}, bench, tasks=TASKS[:1], attempts=4)
    assert max(bench.seen.values()) == 1
    assert len({one.candidate.content_hash for one in augmenter.state.demonstrations()}) == 3
    assert len(augmenter.state.demonstrations()) == 3
    verdicts = {name: one["verdicts"] for name, one in summarize(augmenter.state, TASKS)["teachers"].items()}
    assert verdicts["first"] in ({"accepted": 1, "duplicate": 3}, {"duplicate": 4})


def test_what_is_not_kept_is_told_apart() -> None:
    teacher = ScriptedTeacher(["prose", "slow", "good", "lost"])
    augmenter = augmented({"t": teacher}, Bench(), tasks=TASKS[:1], attempts=4, above=1.0)
    figures = summarize(augmenter.state, TASKS[:1])["teachers"]["t"]
    assert figures["verdicts"] == {"unreadable": 1, "slow": 1, "accepted": 1, "unscored": 1}
    assert figures["reasons"] == {"no_code": 1, "device_fault": 1}


def test_a_fault_of_the_machine_gets_another_evaluation_and_is_no_verdict_on_the_kernel() -> None:
    bench = Bench()
    bench.lose = 1
    augmenter = augmented({"t": ScriptedTeacher(["good"])}, bench, tasks=TASKS[:1], attempts=1)
    assert len(augmenter.state.demonstrations()) == 1
    bench = Bench()
    bench.lose = 2
    augmenter = augmented({"t": ScriptedTeacher(["good-1"])}, bench, tasks=TASKS[:1], attempts=2)
    pair = augmenter.state.pair("t", TASKS[0].content_hash)
    assert [pair.verdicts[n].verdict for n in (0, 1)] == ["unscored", "accepted"]


def test_a_lost_teacher_holds_up_no_other_and_is_asked_again_by_the_next_command() -> None:
    entries: list[Entry] = []
    lost, good = ScriptedTeacher(["gone"]), ScriptedTeacher(["good"])
    augmenter = augmented({"lost": lost, "good": good}, Bench(), entries=entries)
    assert augmenter.lost == {"lost": "the endpoint is gone"}
    assert len(augmenter.state.demonstrations()) == 6
    assert augmenter.left() == 3
    again = augmented({"lost": ScriptedTeacher(["good"]), "good": good}, Bench(), entries=entries)
    assert again.left() == 0
    assert sum(good.asked.values()) == 6, "what was finished is not asked again"


def test_refusals_and_impossible_tasks_are_closed_for_good() -> None:
    entries: list[Entry] = []
    refusing, asking = ScriptedTeacher(["refuse"]), ScriptedTeacher(["impossible"])
    augmented({"r": refusing, "a": asking}, Bench(), entries=entries, tasks=TASKS[:1])
    augmenter = augmented({"r": refusing, "a": asking}, Bench(), entries=entries, tasks=TASKS[:1])
    assert (sum(refusing.asked.values()), sum(asking.asked.values())) == (1, 1)
    assert augmenter.left() == 0
    assert any(isinstance(entry, Skipped) and entry.reason == "reference_failed" for entry in entries)


def test_the_limit_of_the_costs_ends_the_asking() -> None:
    """Each answer costs 0.5; with two tasks at once at most two are under way when 2.0 is reached."""
    teacher = ScriptedTeacher(["wrong"])
    augmenter = augmented({"t": teacher}, Bench(), max_cost=2.0)
    assert augmenter.spent
    assert 4 <= sum(teacher.asked.values()) <= 5
    assert augmenter.left() == 3


def test_imports_are_evaluated_once_and_kept_without_a_limit() -> None:
    entries: list[Entry] = []
    kernels = [Imported("import:x", TASKS[0], Candidate(source=kernel("good", n))) for n in range(5)]
    kernels.append(Imported("import:x", TASKS[1], Candidate(source=kernel("wrong"))))
    bench = Bench()
    for _ in range(2):
        augmenter = augmented({}, bench, entries=entries, imports=kernels)
    assert set(bench.seen.values()) == {1}
    kept = augmenter.state.demonstrations()
    assert [one.teacher for one in kept] == ["import:x"] * 5
    assert len(entries) == 6


TWO = {"a": 100, "b": 200}
"""Two teachers whose kernels differ."""


@settings(deadline=None, max_examples=15)
@given(st.sets(st.integers(1, 90), max_size=6), st.sampled_from([["wrong", "good"], ["good", "prose", "good"]]))
def test_a_kill_at_any_moment_loses_nothing_accepted_and_repeats_nothing_finished(
    tmp_path_factory: Any, at: set[int], words: list[str]
) -> None:
    """Kills fall before and after every append to the journal, some with a torn line; the end is that of an unkilled
    run, and each kill costs at most the answers that were on their way."""
    path = tmp_path_factory.mktemp("run") / "journal.jsonl"
    asked: Counter[tuple[str, int]] = Counter()
    bench, points, kills = Bench(), 0, 0
    while True:
        with Journal(path) as journal:

            def note(entry: Entry, journal: Journal = journal) -> None:
                nonlocal points
                for moment in ("before", "after"):
                    points += 1
                    if moment == "after":
                        journal.append(entry)
                    if points in at:
                        raise Killed

            teachers = {name: ScriptedTeacher(words, asked, first=first) for name, first in TWO.items()}
            state = AugmentState.replay(journal.entries)
            augmenter = Augmenter(
                TASKS, teachers, bench.evaluate, AugmentConfig(attempts=6), state, note, device_type="cpu"
            )
            try:
                asyncio.run(augmenter.run())
                break
            except Killed:
                kills += 1
        if kills % 2:
            with path.open("ab") as file:
                file.write(b'{"kind":"answ')
    whole = augmented({n: ScriptedTeacher(words, first=first) for n, first in TWO.items()}, Bench(), attempts=6)
    kept = [{(d.task.id, d.candidate.content_hash) for d in run.state.demonstrations()} for run in (augmenter, whole)]
    assert kept[0] == kept[1]
    with Journal(path) as journal:
        answers = Counter((e.task_id, e.index) for e in journal.entries if isinstance(e, Answered))
        assert AugmentState.replay(journal.entries).demonstrations() == augmenter.state.demonstrations()
    assert max(answers.values()) <= 2, "one answer of each of the two teachers"
    under_way = 2 * teachers["a"].tasks_at_once
    assert sum(asked.values()) - sum(answers.values()) <= kills * under_way


def test_a_journal_is_held_by_one_process_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append(Skipped(task_id="t", task_hash="h", reason="too_large"))
        with pytest.raises(UsageError, match="another process works on"):
            Journal(path)
    with path.open("a") as file:
        file.write('{"kind": "skipped"')
    with Journal(path) as journal:
        assert len(journal.entries) == 1
        journal.append(Skipped(task_id="u", task_hash="h", reason="too_large"))
    with Journal(path) as journal:
        assert [entry.task_id for entry in journal.entries] == ["t", "u"]
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(JournalError, match="line 1 of"):
        Journal(path)


def test_a_full_disk_ends_the_journal_before_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append(Skipped(task_id="t", task_hash="h", reason="too_large"))

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("os.fsync", full)
            with pytest.raises(JournalError, match="free some space"):
                journal.append(Skipped(task_id="u", task_hash="h", reason="too_large"))
    with Journal(path) as journal:
        assert [entry.task_id for entry in journal.entries] == ["t"]


def load(reference: str) -> Task:
    return Task(id=reference, source=REFERENCE)


def test_sets_are_told_by_their_content(tmp_path: Path) -> None:
    skipped: Counter[str] = Counter()
    lines = [
        {"level_id": 1, "task_id": 7, "ref_code": REFERENCE, "custom_code": kernel("good"), "score_default": 9.0},
        {"level_id": 1, "task_id": 8, "ref_code": REFERENCE, "custom_code": None, "score_default": None},
    ]
    (tmp_path / "release.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = read_set(tmp_path / "release.jsonl", "A100", load, skipped)
    assert (found.source, found.task.id, found.candidate.source) == ("import:release", "cuda-l1:1/7", kernel("good"))
    assert skipped == {"no custom_code": 1}

    run = tmp_path / "bench-run"
    run.mkdir()
    (run / "level_2_problem_18_sample_0_kernel.py").write_text(kernel("good"))
    (found,) = read_set(run, "cpu", load, skipped)
    assert (found.source, found.task.id) == ("import:bench-run", "kernelbench:2/18")

    own = tmp_path / "own"
    (own / "norm").mkdir(parents=True)
    (own / "norm" / "task.py").write_text(REFERENCE)
    for name in ("b.py", "a.py"):
        (own / "norm" / name).write_text(kernel(name))
    both = read_set(own, "cpu", load, skipped)
    assert [one.candidate.detail for one in both] == ["norm/a.py", "norm/b.py"]
    assert {one.task.name for one in both} == {"norm"}

    kept = tmp_path / "earlier"
    kept.mkdir()
    measured = evaluation(TASKS[0], Candidate(source="x"), "good").measurement
    assert measured is not None
    one = Demonstration(
        task=TASKS[0], candidate=Candidate(source="x"), teacher="t", device_type="cpu", measurement=measured
    )
    (kept / "demonstrations.jsonl").write_text(one.to_json() + "\n")
    (found,) = read_set(kept, "cpu", load, skipped)
    assert (found.source, found.task) == ("import:earlier", TASKS[0])


@pytest.mark.parametrize(("name", "content", "said"), [
    ("missing", None, "there is no"), ("words.jsonl", "hello\n", "line 1 of .* is not JSON"),
    ("other.jsonl", '{"a": 1}\n', "neither of CUDA-L1's release"), ("empty", {}, "each task.py needs its kernels"),
    ("bad", {"task.py": "x = 1"}, "is not a task"), ("binary.jsonl", b"\xff\xfe\x00", "not a text file"),
])  # fmt: skip
def test_a_set_that_cannot_be_read_is_one_sentence(tmp_path: Path, name: str, content: Any, said: str) -> None:
    path = tmp_path / name
    if isinstance(content, str):
        path.write_text(content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
        for inner, text in content.items():
            (path / inner).write_text(text)
    with pytest.raises(UsageError, match=said):
        read_set(path, "cpu", load, Counter())
