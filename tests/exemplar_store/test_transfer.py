"""Export, import, verification, pruning: nothing lost, nothing doubled, nothing trusted that was not measured here."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from exemplar_store import CacheKey, ExemplarStore, RunStream, transfer
from exemplar_store.codec import pack
from exemplar_store.config import BucketCaps
from exemplar_store.contents import items, stats
from exemplar_store.errors import StoreUsageError
from exemplar_store.hacking_cases import HackingCases
from exemplar_store.keys import Shelf
from exemplar_store.pruning import owner_of_run, pin, prune, prune_evaluations, unpin
from exemplar_store.transfer import LINES_PER_MARK, export_file, import_path
from exemplar_store.verify import verify
from tasks.records import Task

TASK, OTHER = "a" * 64, "b" * 64
REFERENCE = "import torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x.sum()\n"
KERNEL = REFERENCE.replace("Model", "ModelNew")


@pytest.fixture
def filled(
    store: ExemplarStore, make_exemplar: Callable, make_prompt: Callable, make_scored: Callable
) -> ExemplarStore:
    """Records of every kind: 90 exemplars of two tasks, evaluations, a task, cases, an open group."""
    store.insert_many(make_exemplar(number, 0.7 + number / 40) for number in range(50))
    store.insert_many(make_exemplar(number, 2.0, device_type="H100") for number in range(30))
    store.insert_many(make_exemplar(number, 1.1, task_hash=OTHER, protocol="reward") for number in range(10))
    store.put_task(Task(id="file:1", source=REFERENCE))
    HackingCases(store).seed()
    run = RunStream(store, "run")
    run.open_group(make_prompt("p"), 3)
    run.record(make_scored("p", 0, "rejected"))
    run.record(make_scored("p", 1))
    return store


def test_stats_count_everything(filled: ExemplarStore) -> None:
    counted = stats(filled)
    assert counted.exemplars == {"cpu|fp32|sequential": 50, "H100|fp32|sequential": 30, "cpu|fp32|reward": 10}
    assert (counted.tasks, counted.evaluations, counted.claims, counted.runs) == (3, 2, 0, ["run"])
    assert counted.hacking_cases == len(HackingCases(filled).all())
    assert counted.memory_bytes
    assert counted.memory_bytes > 10_000


def test_export_and_import_give_the_same_bytes(
    filled: ExemplarStore, open_store: Callable[..., ExemplarStore], tmp_path: Path
) -> None:
    seen: list[int] = []
    lines = export_file(filled, tmp_path / "a.jsonl", seen.append)
    assert lines == seen[-1] == len((tmp_path / "a.jsonl").read_bytes().splitlines())
    other = open_store(namespace="copy", bucket_width=0.25)
    result = import_path(other, tmp_path / "a.jsonl")
    assert result.read == lines == sum(result.new.values())
    assert result.new == {"exemplar": 90, "evaluation": 2, "task": 1, "hacking_case": lines - 93}
    export_file(other, tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    again = import_path(other, tmp_path / "a.jsonl")
    assert (sum(again.new.values()), sum(again.known.values())) == (0, lines)
    assert verify(other, sources=True).consistent


def interrupted_export(store: ExemplarStore, target: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An export that ended after some lines; answers its part."""
    whole = transfer.export_lines
    with monkeypatch.context() as patch:

        def broken(*arguments: object, **more: object) -> Iterator[str]:
            yield from islice(whole(*arguments, **more), after)
            raise KeyboardInterrupt

        patch.setattr(transfer, "export_lines", broken)
        with pytest.raises(KeyboardInterrupt):
            export_file(store, target)
    (part,) = target.parent.glob("*.part")
    return part


def test_an_interrupted_export_goes_on(filled: ExemplarStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut at every tenth byte of the whole file, within lines and between them, the result is the same file."""
    whole, target = tmp_path / "whole.jsonl", tmp_path / "target[1].jsonl"
    export_file(filled, whole)
    data = whole.read_bytes()
    part = interrupted_export(filled, target, 50, monkeypatch)
    assert data.startswith(part.read_bytes())
    for cut in range(0, len(data), len(data) // 10):
        part.write_bytes(data[:cut])
        written: list[int] = []
        assert export_file(filled, target, written.append) == data.count(b"\n")
        assert target.read_bytes() == data
        assert not part.exists()


def test_an_export_of_a_store_that_grew_is_begun_anew(
    filled: ExemplarStore, make_exemplar: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part ends with the last task; what came since belongs to the first one."""
    target = tmp_path / "a.jsonl"
    whole = export_file(filled, target)
    interrupted_export(filled, target, whole - 1, monkeypatch)
    filled.insert(make_exemplar(1000, 1.25))
    assert export_file(filled, target) == whole + 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_an_interrupted_import_goes_on_after_its_last_batch(
    filled: ExemplarStore, open_store: Callable, tmp_path: Path
) -> None:
    export_file(filled, tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    many = tmp_path / "many.jsonl"
    many.write_bytes(b"".join(lines * 10))
    other = open_store(namespace="copy")

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_path(other, many, progress=interrupt)
    rest = import_path(other, many)
    assert rest.resumed
    assert rest.read == 10 * len(lines) - LINES_PER_MARK
    assert verify(other).exemplars == 90
    assert not import_path(other, many).resumed, "a finished import leaves no mark"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "neither a line of an export, nor one of CUDA-L1's release, nor a hacking case"),
        ('{"family":"replay","reason":"x","code":"x","explanation":"x"}', "holds no hacking_case"),
        ('{"format":"kontrast-store","kind":"exemplar","record":{},"schema":2}', "has schema 2"),
        ('{"format":"kontrast-store","kind":"exemplar","record":{},"schema":1}', "holds no exemplar"),
        ('{"format":"kontrast-store","kind":"x","record":{},"schema":1}', "holds no x"),
    ],
)
def test_a_bad_line_is_named_and_those_before_it_are_kept(
    filled: ExemplarStore, open_store: Callable, tmp_path: Path, line: str, words: str
) -> None:
    export_file(filled, tmp_path / "a.jsonl")
    good = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "bad.jsonl").write_text(f"{good}{line}\n")
    other = open_store(namespace="copy")
    with pytest.raises(StoreUsageError, match=words) as caught:
        import_path(other, tmp_path / "bad.jsonl")
    assert f"ends at byte {len(good.encode()) + len(line) + 1}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert verify(other).exemplars == 90


def test_hacking_cases_are_imported_by_themselves(filled: ExemplarStore, open_store: Callable, tmp_path: Path) -> None:
    """As people write them, one a line, beside lines of an export."""
    cases = HackingCases(filled).all()
    export_file(filled, tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("".join(f"{case.to_json()}\n" for case in cases[:3]))
    other = open_store(namespace="copy")
    assert import_path(other, tmp_path / "b.jsonl").new == {"hacking_case": 3}
    assert import_path(other, tmp_path / "a.jsonl").known == {"hacking_case": 3}
    assert HackingCases(other).all() == cases


def test_what_is_no_file_is_refused(store: ExemplarStore, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(StoreUsageError, match="neither a file"):
            import_path(store, path)
    with pytest.raises(StoreUsageError, match="cannot be written"):
        export_file(store, tmp_path / "absent" / "a.jsonl")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(StoreUsageError, match="no regular file"):
            export_file(store, path)
    assert (tmp_path / "pipe").is_fifo(), "a device is never replaced by a file"


def test_cuda_l1_lines_become_tasks_and_claims(store: ExemplarStore, tmp_path: Path) -> None:
    """Only the five named fields are needed; a kernel that is null, empty or the text "None" is counted and skipped."""
    lines = [
        {"level_id": 1, "task_id": 7, "ref_code": REFERENCE, "custom_code": KERNEL, "score_default": 12.5},
        {"level_id": 2, "task_id": 8, "ref_code": REFERENCE + "#\n", "custom_code": KERNEL + "x = 1\n",
         "score_default": None},
        *({"level_id": 3, "task_id": 9, "ref_code": REFERENCE, "custom_code": code, "score_default": 2.0}
          for code in (None, "", "None")),
        {"level_id": 3, "task_id": 10, "ref_code": None, "custom_code": KERNEL, "score_default": 2.0},
    ]  # fmt: skip
    (tmp_path / "a100.json").write_text("\n".join(json.dumps(line) for line in lines))
    result = import_path(store, tmp_path / "a100.json", device_type="A100")
    assert result.read == 6
    assert result.new == {"task": 1, "claim": 2}
    assert result.known == {"task": 1}, "a comment makes no new task"
    assert result.skipped == {"no custom_code": 3, "no ref_code": 1}
    task_hash = Task(id="x", source=REFERENCE).content_hash
    assert store.task(task_hash).id == "cuda-l1:1/7"
    assert store.best(task_hash, "A100") is None, "a claimed number is no measurement"
    assert store.shelves(task_hash) == {}
    assert stats(store).claims == 2
    assert verify(store).consistent


def test_the_released_sample_imports(store: ExemplarStore, shared_dir: Path) -> None:
    result = import_path(store, shared_dir / "data" / "cuda_l1_a100_sample.jsonl", device_type="A100")
    assert (result.read, result.new["task"], result.new["claim"]) == (40, 37, 37)
    assert result.skipped == {"no custom_code": 3}
    assert verify(store).consistent


def test_a_kernelbench_run_folder_becomes_claims(store: ExemplarStore, tmp_path: Path) -> None:
    run = tmp_path / "my_run"
    run.mkdir()
    for problem, sample in ((3, 0), (3, 1), (4, 0)):
        name = f"level_2_problem_{problem}_sample_{sample}_kernel.py"
        (run / name).write_text(KERNEL + f"number = {problem}{sample}\n")
    (run / "level_2_problem_5_sample_0_kernel.py").write_text("\n")
    (run / "eval_results.json").write_text(
        json.dumps(
            {
                "3": [
                    {"sample_id": 1, "compiled": True, "correctness": False},
                    {"sample_id": 0, "runtime": 2.0, "ref_runtime": 5.0},
                ],
                "4": [{"sample_id": 0, "runtime": 2.0, "ref_runtime": -1.0}],
            }
        )
    )
    asked: list[str] = []

    def load_task(name: str) -> Task:
        asked.append(name)
        return Task(id=name, source=f"{REFERENCE}{name!r}\nnumber = {len(name)}\nlevel = {name[-1]}\n")

    result = import_path(store, run, device_type="H100", load_task=load_task)
    assert asked == ["kernelbench:2/3", "kernelbench:2/4"]
    assert result.new == {"task": 2, "claim": 2}
    assert result.skipped == {"wrong by its own results": 1, "empty kernel": 1}
    assert verify(store).claims == 2
    claims = [item.record for item in items(store) if item.kind == "claim"]
    assert {claim.task_id: claim.claimed_speedup for claim in claims} == {
        "kernelbench:2/3": 2.5, "kernelbench:2/4": None,
    }  # fmt: skip


@pytest.mark.parametrize("results", ["[", "[1]", '{"level_1": [{}]}', '{"3": [7]}', '{"3": {"sample_id": null}}'])
def test_results_that_are_not_kernelbenchs_are_one_sentence(store: ExemplarStore, tmp_path: Path, results: str) -> None:
    (tmp_path / "level_2_problem_3_sample_0_kernel.py").write_text(KERNEL)
    (tmp_path / "eval_results.json").write_text(results)
    with pytest.raises(StoreUsageError, match="does not have KernelBench's results") as caught:
        import_path(store, tmp_path, load_task=lambda name: Task(id=name, source=REFERENCE))
    assert "\n" not in str(caught.value)


def test_verify_finds_a_sound_store_sound(filled: ExemplarStore) -> None:
    verdict = verify(filled, sources=True)
    assert verdict.problems == []
    assert verdict.summary() == "3 tasks, 90 exemplars, 2 evaluations, 0 claims, 1 groups: consistent"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda s, k, i: s.call("HINCRBY", k("stats"), "cpu|fp32|sequential|12|n", 1), "bucket 12 counts"),
        (lambda s, k, i: s.call("HINCRBY", k("stats"), "cpu|fp32|sequential|12|s", 1), "bucket 12 counts"),
        (lambda s, k, i: s.call("HDEL", k("exemplars:cpu|fp32|sequential"), i), "a score but no record"),
        (lambda s, k, i: s.call("ZREM", k("scores:cpu|fp32|sequential"), i), "a record but no score"),
        (lambda s, k, i: s.call("ZADD", k("scores:cpu|fp32|sequential"), 77, i), "has score 77.0"),
        (lambda s, k, i: s.call("HSET", k("exemplars:cpu|fp32|sequential"), i, "junk"), "cannot be read"),
        (lambda s, k, i: s.call("HSET", k("evaluations:cpu|fp32|sequential"), i, "junk"), "cannot be read"),
        (lambda s, k, i: s.call("HSET", k("evaluations:cpu|fp32|sequential"), i, b"\x01junk"), "is damaged"),
        (lambda s, k, i: s.call("HSET", k("evaluations:cpu|fp32|sequential"), i, pack("{}")), "by this version"),
        (lambda s, k, i: s.call("HSET", k("exemplars:cpu|fp32|sequential"), i, b"1|8|1|\x01junk"), "is damaged"),
        (lambda s, k, i: s.call("HSET", k("claims:cpu|fp32|claimed"), i, b"\x01junk"), "is damaged"),
        (lambda s, k, i: s.call("HSET", k("islands:cpu|fp32|sequential"), "f" * 32, ",1,"), "on an island and has no"),
        (lambda s, k, i: s.call("HSET", k("pins"), f"cpu|fp32|sequential|{i}", 1), "counts 1 owners of pins and has 0"),
        (lambda s, k, i: s.call("HSET", k("pins"), f"me|cpu|fp32|sequential|{i}", 1), "counts 0 owners of pins and ha"),
        (
            lambda s, k, i: s.calls(
                [
                    ("HSET", k("pins"), f"me|cpu|fp32|sequential|{'f' * 32}", 1),
                    ("HSET", k("pins"), f"cpu|fp32|sequential|{'f' * 32}", 1),
                ]
            ),
            "pinned and has no",
        ),
        (lambda s, k, i: s.call("HSET", k("group:run:p"), "size", 2), "is complete and not in the outbox"),
        (lambda s, k, i: s.call("HINCRBY", k("group:run:p"), "left", 1), "counts 3 samples and holds 2"),
        (lambda s, k, i: s.call("SADD", k("outbox:run"), "p"), "waits in the outbox and is not complete"),
        (lambda s, k, i: s.call("HINCRBY", k("ledger:run"), "accepted", 5), "more than were dispatched"),
    ],
)
def test_verify_finds_each_kind_of_damage(
    filled: ExemplarStore, make_exemplar: Callable, damage: Callable, words: str
) -> None:
    name = make_exemplar(3).candidate_hash[:32]
    damage(filled.connection, lambda key: filled.keys.task(TASK, key), name)
    verdict = verify(filled)
    assert not verdict.consistent
    assert any(words in problem for problem in verdict.problems), verdict.problems
    assert verdict.summary().endswith("differences")


def test_thirty_two_clients_leave_every_index_right(
    open_store: Callable[..., ExemplarStore], make_exemplar: Callable
) -> None:
    """12 insert under caps, 8 measure anew, 6 prune, 4 pin and let go, 2 recount all the while and find no difference.

    The 20 exemplars pinned before are there in the end, however low they stand in their buckets.
    """
    stores = [open_store(caps={"best": 4, "newest": 4, "random": 4}) for _ in range(32)]
    pinned = [make_exemplar(number, 1.0 + number % 5 / 10) for number in range(20)]
    stores[0].insert_many(pinned)
    assert pin(stores[0], "report:run", pinned) == 20
    going = threading.Barrier(32)

    def work(client: int) -> list[str]:
        store, rng, problems = stores[client], Random(client), []
        going.wait()
        for turn in range(30):
            number = rng.randrange(20, 200)
            exemplar = make_exemplar(number, 1.0 + rng.random() / 2)
            if client < 12:
                store.insert_many([exemplar, make_exemplar(number + 1, 1.0 + rng.random() / 2)])
            elif client < 20:
                store.insert(exemplar, replace=True)
            elif client < 26:
                prune(store, BucketCaps(best=2, newest=2, random=2))
            elif client < 30:
                with contextlib.suppress(StoreUsageError):  # it has been pruned
                    pin(store, f"checkpoint:{client}", [exemplar])
                if turn % 10 == 9:
                    unpin(store, f"checkpoint:{client}")
            else:
                problems += verify(store).problems
        return problems

    with ThreadPoolExecutor(32) as clients:
        assert list(clients.map(work, range(32))) == [[]] * 32
    assert verify(stores[0], sources=True).problems == []
    left = {exemplar.candidate_hash for exemplar in stores[0].top(TASK, "cpu", 999)}
    assert left >= {exemplar.candidate_hash for exemplar in pinned}
    assert len(left) < 200


def test_pruning_keeps_best_newest_and_pinned(store: ExemplarStore, make_exemplar: Callable) -> None:
    """One bucket of 40, speedups falling as they arrive: best 2 are the first, newest 3 the last."""
    exemplars = [make_exemplar(number, 1.599 - 0.001 * number) for number in range(40)]
    store.insert_many(exemplars)
    assert pin(store, "report:run/7", exemplars[20:22]) == 2
    assert pin(store, "report:run/7", exemplars[20:22]) == 0
    assert pin(store, "checkpoint:3", exemplars[21:22]) == 1
    assert prune(store, BucketCaps(best=2, newest=3)) == 33
    kept = {exemplar.candidate_hash for exemplar in store.top(TASK, "cpu", 99)}
    assert kept == {exemplar.candidate_hash for exemplar in exemplars[:2] + exemplars[20:22] + exemplars[-3:]}
    assert verify(store).consistent
    assert unpin(store, "report:run/7") == 2
    assert prune(store, BucketCaps(best=2, newest=3)) == 1, "the checkpoint still holds the other"
    assert unpin(store, "checkpoint:3") == 1
    assert prune(store, BucketCaps(best=2, newest=3)) == 1
    assert store.shelves(TASK)[Shelf("cpu")][0].count == 5
    with pytest.raises(StoreUsageError, match="not in the store"):
        pin(store, "x", exemplars[20:21])
    with pytest.raises(StoreUsageError, match="at least one cap"):
        prune(store, BucketCaps())


def test_what_a_report_shows_and_a_checkpoint_replays_is_never_pruned(
    open_store: Callable[..., ExemplarStore], make_exemplar: Callable, make_prompt: Callable, make_scored: Callable,
    exemplar_of: Callable,
) -> None:  # fmt: skip
    """One bucket of 20. The run's samples have 1.55 and then 1.54: its report shows the first. A group that shows two
    slow ones waits for a checkpoint, another is open; when both are acked or gone, pruning takes what they showed.
    """
    store = open_store()
    shown = [make_exemplar(number, 1.501 + number / 1000) for number in range(2)]
    store.insert_many([*shown, *(make_exemplar(number, 1.52 + number / 1000) for number in range(2, 18))])
    run = RunStream(store, "run")
    for index, exemplar in enumerate(shown):
        prompt = make_prompt(f"p{index}").model_copy(update={"exemplar_hashes": (exemplar.candidate_hash,)})
        run.open_group(prompt, 2 + index)
    for index, speedup in enumerate((1.55, 1.54)):
        scored = make_scored("p0", index, speedup=speedup)
        run.record(scored, exemplar_of(scored))
    run.relay()

    def left() -> list[float]:
        return sorted(round(exemplar.speedup, 3) for exemplar in store.top(TASK, "cpu", 99))

    prune(store, BucketCaps(newest=1))
    assert left() == [1.501, 1.502, 1.54, 1.55], "the newest, the run's best, and what both groups show"
    run.fence("learner")
    run.ack([entry for entry, _ in run.read_scored("learner", 9, 0)])
    prune(store, BucketCaps(newest=1))
    assert left() == [1.502, 1.54, 1.55]
    assert unpin(store, owner_of_run("run")) == 1
    prune(store, BucketCaps(newest=1))
    assert left() == [1.502, 1.54]
    assert verify(store).consistent


def test_the_caps_of_a_running_store_leave_the_runs_best(
    open_store: Callable[..., ExemplarStore], make_prompt: Callable, make_scored: Callable, exemplar_of: Callable
) -> None:
    """Only the newest two of a bucket stay, and the run's best, which came first."""
    store = open_store(caps={"newest": 2})
    run = RunStream(store, "run")
    run.open_group(make_prompt("p"), 9)
    for index in range(9):
        scored = make_scored("p", index, speedup=1.59 - index / 100)
        run.record(scored, exemplar_of(scored))
    kept = [round(exemplar.speedup, 2) for exemplar in store.top(TASK, "cpu", 99)]
    assert kept[0] == 1.59
    assert 3 <= len(kept) < 9
    assert verify(store).consistent


def test_a_random_sample_does_not_depend_on_arrival(
    open_store: Callable[..., ExemplarStore], make_exemplar: Callable
) -> None:
    exemplars = [make_exemplar(number, 1.5 + number / 1000) for number in range(60)]
    kept = []
    for number, order in enumerate((exemplars, exemplars[::-1], exemplars[30:] + exemplars[:30])):
        store = open_store(namespace=f"order{number}", caps={"random": 8})
        store.insert_many(order)
        prune(store, BucketCaps(random=8))
        kept.append({exemplar.candidate_hash for exemplar in store.top(TASK, "cpu", 99)})
    assert kept[0] == kept[1] == kept[2]
    assert len(kept[0]) == 8


def test_pruning_evaluations_removes_other_versions(filled: ExemplarStore, make_scored: Callable) -> None:
    scored = make_scored("q", 1).evaluation
    old = scored.model_copy(update={"versions": scored.versions.model_copy(update={"evaluator": "0"})})
    filled.cache(CacheKey.of(old), old)
    assert prune_evaluations(filled) == 1
    assert stats(filled).evaluations == 2
