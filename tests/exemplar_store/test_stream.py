"""Events, groups, relay and fencing: each once, whatever crashes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest

from exemplar_store import CacheKey, ExemplarStore, RunStream
from exemplar_store.errors import StaleToken, StoreUsageError
from exemplar_store.keys import Shelf

TASK = "a" * 64


@pytest.fixture
def run(store: ExemplarStore) -> RunStream:
    return RunStream(store, "run")


def fill(run: RunStream, make_prompt: Callable, make_scored: Callable, group_id: str, size: int = 2) -> None:
    run.open_group(make_prompt(group_id), size)
    for index in range(size):
        run.record(make_scored(group_id, index))


def scored_ids(run: RunStream) -> list[str]:
    """Group ids in the stream, without reading as a consumer."""
    entries = run.store.connection.call("XRANGE", run.store.keys.run(run.run_id, "scored"), "-", "+")
    return [fields[b"group"].decode() for _, fields in entries]


def test_events_replay_in_order_over_pages(run: RunStream, store: ExemplarStore) -> None:
    events = [{"kind": "sample_left", "number": number, "text": "\u00fc"} for number in range(1203)]
    for event in events:
        run.append(event)
    assert list(RunStream(store, "run").events()) == events
    assert list(RunStream(store, "other").events()) == []


def test_an_event_sent_twice_is_appended_once(run: RunStream) -> None:
    """The answer to the first append is lost: the handle counts it as not appended and sends the same number again."""
    run.append({"n": 1})
    run._appended = 0
    run.append({"n": 1})
    run.append({"n": 2})
    assert list(run.events()) == [{"n": 1}, {"n": 2}]


def test_an_old_coordinator_cannot_append(run: RunStream, store: ExemplarStore) -> None:
    run.fence("coordinator")
    run.append({"n": 1})
    newer = RunStream(store, "run")
    newer.fence("coordinator")
    with pytest.raises(StaleToken, match="another coordinator"):
        run.append({"n": 2})
    newer.append({"n": 3})
    assert list(run.events()) == [{"n": 1}, {"n": 3}]


def test_a_group_is_readable_until_it_is_acked(run: RunStream, make_prompt: Callable, make_scored: Callable) -> None:
    """Never opened: None; open with one sample of two; relayed with both; acked: None again."""
    task_hash = make_prompt("p").task_hash
    assert run.group("p", task_hash) is None
    fill(run, make_prompt, make_scored, "other")
    run.open_group(make_prompt("p"), 2)
    run.record(make_scored("p", 1))
    standing = run.group("p", task_hash)
    assert standing is not None
    assert [scored.sample.index for scored in standing.samples] == [1]
    run.record(make_scored("p", 0))
    run.relay()
    standing = run.group("p", task_hash)
    assert standing is not None
    assert standing.prompt == make_prompt("p")
    assert len(standing.samples) == 2
    run.fence("learner")
    run.ack([entry for entry, _ in run.read_scored("learner", 9, 0)])
    assert run.group("p", task_hash) is None


def test_recording_moves_bucket_group_cache_and_ledger_together(
    run: RunStream, store: ExemplarStore, make_prompt: Callable, make_scored: Callable, exemplar_of: Callable
) -> None:
    assert run.open_group(make_prompt("p"), 4)
    assert not run.open_group(make_prompt("p"), 4)
    accepted = make_scored("p", 0, speedup=1.53)
    progress = run.record(accepted, exemplar_of(accepted))
    assert progress == (True, 1, 4, False, True, 15)
    assert run.record(accepted, exemplar_of(accepted)) == (False, 1, 4, False, False, None)
    assert run.record(make_scored("p", 1, "rejected")).left == 2
    assert run.record(make_scored("p", 2, "unscored")).left == 3
    assert run.ledger() == {
        "dispatched": 4, "accepted": 1, "rejected": 1, "unscored": 1, "cancelled": 0, "in_flight": 1,
    }  # fmt: skip
    assert run.relay() == 0, "three of four"
    (last,) = run.cancel(["p/3"])
    assert last.complete
    assert run.ledger()["in_flight"] == 0
    assert store.best(TASK, "cpu") == exemplar_of(accepted)
    assert store.cached(CacheKey.of(accepted.evaluation)) == accepted.evaluation
    assert store.cached(CacheKey.of(make_scored("p", 1, "rejected").evaluation)).reason == "incorrect"
    assert store.cached(CacheKey.of(make_scored("p", 2, "unscored").evaluation)) is None
    assert run.relay() == 1
    ((_, group),) = run.read_scored("learner", 9, 0)
    assert group.id == "p"
    assert group.prompt == make_prompt("p")
    assert [s.evaluation and s.evaluation.outcome for s in group.samples] == ["accepted", "rejected", "unscored", None]
    assert group.samples[0] == accepted


def test_late_copies_of_a_sample_change_nothing_after_the_relay(
    run: RunStream, make_prompt: Callable, make_scored: Callable
) -> None:
    fill(run, make_prompt, make_scored, "p")
    run.relay()
    assert run.record(make_scored("p", 1)) == (False, 0, 0, True, False, None)
    assert run.cancel(["p/1"]) == [(False, 0, 0, True, False, None)]
    assert not run.open_group(make_prompt("p"), 2)
    assert run.relay() == 0
    assert run.ledger()["accepted"] == 2
    assert scored_ids(run) == ["p"]


def test_misuse_is_refused(run: RunStream, store: ExemplarStore, make_prompt: Callable, make_scored: Callable) -> None:
    run.open_group(make_prompt("p"), 2)
    with pytest.raises(StoreUsageError, match="never opened"):
        run.record(make_scored("q", 0))
    with pytest.raises(StoreUsageError, match="never opened"):
        run.cancel(["q/0"])
    with pytest.raises(StoreUsageError, match="index 2 in a group of 2"):
        run.record(make_scored("p", 2))
    with pytest.raises(StoreUsageError, match="another size"):
        run.open_group(make_prompt("p"), 3)
    with pytest.raises(StoreUsageError, match="fits not"):
        run.open_group(make_prompt("p", run_id="other"), 2)
    with pytest.raises(StoreUsageError, match="run id"):
        RunStream(store, "a}b")
    assert run.ledger()["in_flight"] == 2


def test_relay_survives_a_crash_after_each_exchange(
    store: ExemplarStore, make_prompt: Callable, make_scored: Callable
) -> None:
    """A relay is abandoned after its k-th exchange, for every k until it ends by itself; the next one finishes."""
    for crash_after in range(100):
        run = RunStream(store, f"run-{crash_after}")
        for group_id in ("p", "q"):
            run.open_group(make_prompt(group_id, run_id=run.run_id), 1)
            run.record(make_scored(group_id, 0))
        run.open_group(make_prompt("r", run_id=run.run_id), 1)
        steps = list(islice(run.relay_steps(), crash_after))
        moved = sum(steps) + run.relay()
        assert moved == 2
        assert scored_ids(run) == ["p", "q"]
        assert run.relay() == 0
        open_groups = store.connection.call("HGETALL", store.keys.run(run.run_id, "open"))
        assert set(open_groups) == {b"r"}, "only the unfinished group is left to watch"
        assert store.connection.call("EXISTS", store.keys.group(TASK, run.run_id, "p")) == 0
        assert store.connection.call("EXISTS", store.keys.task_run(TASK, "outbox", run.run_id)) == 0
        if len(steps) < crash_after:
            assert crash_after > 8, "the relay has at least eight places to crash"
            return
    pytest.fail("the relay never ended")


def test_many_relays_and_writers_at_once_move_each_group_once(
    open_store: Callable, make_prompt: Callable, make_scored: Callable, exemplar_of: Callable
) -> None:
    """32 workers record 16 groups of 4 samples, each worker every sample twice, and relay all the while."""
    runs = [RunStream(open_store(), "run") for _ in range(32)]
    for number in range(16):
        runs[0].open_group(make_prompt(f"p{number}"), 4)

    def work(worker: int) -> int:
        moved = 0
        for number in range(64):
            group, index = divmod((number + worker * 2) % 64, 4)
            for offset in (0, 1):
                scored = make_scored(f"p{group}", (index + offset) % 4, speedup=1.0 + 0.01 * group)
                runs[worker].record(scored, exemplar_of(scored))
            if number % 16 == 0:
                moved += runs[worker].relay()
        return moved

    with ThreadPoolExecutor(32) as workers:
        moved = sum(workers.map(work, range(32)))
    moved += runs[0].relay()
    assert moved == 16
    assert sorted(scored_ids(runs[0])) == sorted(f"p{number}" for number in range(16))
    assert runs[0].ledger() == {
        "dispatched": 64, "accepted": 64, "rejected": 0, "unscored": 0, "cancelled": 0, "in_flight": 0,
    }  # fmt: skip
    buckets = runs[0].store.shelves(TASK)[Shelf("cpu")]
    assert sum(bucket.count for bucket in buckets) == 64


def test_groups_stay_pending_until_acked(run: RunStream, make_prompt: Callable, make_scored: Callable) -> None:
    for number in range(3):
        fill(run, make_prompt, make_scored, f"p{number}")
    run.relay()
    token = run.fence("learner")
    assert run.claim_all(token) == []
    first = run.read_scored("learner", 2, 0)
    assert [group.id for _, group in first] == ["p0", "p1"]
    assert [group.id for _, group in run.read_scored("learner", 2, 0)] == ["p2"]
    assert run.read_scored("learner", 2, 0) == []
    assert run.ack([entry_id for entry_id, _ in first]) == 2
    assert run.ack([entry_id for entry_id, _ in first]) == 0
    assert scored_ids(run) == ["p2"]


def test_a_successor_gets_what_is_pending_and_shuts_the_old_one_out(
    run: RunStream, store: ExemplarStore, make_prompt: Callable, make_scored: Callable
) -> None:
    for number in range(90):
        fill(run, make_prompt, make_scored, f"p{number:03}", 1)
    run.relay()
    old_token = run.fence("learner")
    taken = run.read_scored("first", 85, 0)
    assert len(taken) == 85
    run.ack([entry_id for entry_id, _ in taken[:10]])
    successor = RunStream(store, "run")
    token = successor.fence("learner")
    for forbidden in (
        lambda: run.ack([taken[20][0]]),
        lambda: run.read_scored("first", 1, 0),
        lambda: run.claim_all(old_token),
    ):
        with pytest.raises(StaleToken, match="another learner"):
            forbidden()
    replayed = successor.claim_all(token, "second")
    assert [group.id for _, group in replayed] == [f"p{number:03}" for number in range(10, 85)]
    fresh = successor.read_scored("second", 99, 0)
    assert [group.id for _, group in fresh] == [f"p{number:03}" for number in range(85, 90)]
    assert successor.ack([entry_id for entry_id, _ in replayed + fresh]) == 80
    assert successor.claim_all(token, "second") == []


def test_an_answer_lost_on_its_way_is_read_again(
    run: RunStream, store: ExemplarStore, make_prompt: Callable, make_scored: Callable
) -> None:
    """The server delivers p0 but the reply never arrives; the same consumer asks again and gets it, before p1."""
    fill(run, make_prompt, make_scored, "p0")
    fill(run, make_prompt, make_scored, "p1")
    run.relay()
    run._ensure_consumer_group()
    store.connection.script("read_scored", run._guarded(), [0, "learner", "me", 1, "0-0"])
    assert [group.id for _, group in run.read_scored("me", 5, 0)] == ["p0"]
    assert [group.id for _, group in run.read_scored("me", 5, 0)] == ["p1"]


def test_reading_waits_for_the_first_group(
    run: RunStream, open_store: Callable, make_prompt: Callable, make_scored: Callable
) -> None:
    begin = time.monotonic()
    assert run.read_scored("learner", 1, 150) == []
    assert 0.14 < time.monotonic() - begin < 2
    writer = RunStream(open_store(), "run")

    def later() -> None:
        time.sleep(0.2)
        fill(writer, make_prompt, make_scored, "p")
        writer.relay()

    with ThreadPoolExecutor(1) as worker:
        done = worker.submit(later)
        groups = run.read_scored("learner", 1, 10_000)
        done.result()
    assert [group.id for _, group in groups] == ["p"]
    assert time.monotonic() - begin < 5
