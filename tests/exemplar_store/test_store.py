"""Insert, draw, best, the cache, and the checks at opening."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from statistics import fmean

import pytest

from exemplar_store import CacheKey, EmbeddedServer, ExemplarStore
from exemplar_store.errors import StoreError, StoreUnreachable, StoreUsageError, UnknownSchema
from exemplar_store.keys import Shelf
from tasks.records import Exemplar, ScoredSample
from tests.exemplar_store.test_sampling import chi_squared, chi_squared_limit, closed_form

TASK = "a" * 64
CPU = Shelf("cpu")


def test_insert_is_idempotent_and_names_the_bucket(store: ExemplarStore, make_exemplar: Callable) -> None:
    """1.53 at width 0.1 lies in bucket 15, 1.71 in bucket 17."""
    assert store.insert(make_exemplar(1, 1.53)) == (True, 15, 0)
    assert store.insert(make_exemplar(1, 1.53)) == (False, 15, 0)
    assert store.insert(make_exemplar(1, 1.71)) == (False, 15, 0), "the first measurement stands"
    assert store.insert(make_exemplar(1, 1.71), replace=True) == (False, 17, 0)
    assert [(b.index, b.count, b.mean) for b in store.shelves(TASK)[CPU]] == [(17, 1, 1.71)]


def test_an_exemplar_comes_back_as_it_went_in(store: ExemplarStore, make_exemplar: Callable) -> None:
    exemplar = make_exemplar(4, 1.0000000000000002)
    store.insert(exemplar)
    assert store.best(TASK, "cpu") == exemplar


def test_draw_takes_two_buckets_worst_first(store: ExemplarStore, make_exemplar: Callable) -> None:
    store.insert_many(make_exemplar(number, 0.8 + 0.05 * number) for number in range(30))
    for seed in range(20):
        first, second = store.draw(TASK, "cpu", Random(seed))
        assert first.speedup < second.speedup
        assert store.bucketing.index(first.speedup) != store.bucketing.index(second.speedup)


def test_draw_is_uniform_within_a_bucket_on_the_server(store: ExemplarStore, make_exemplar: Callable) -> None:
    """Five kernels of one bucket, 2,000 draws: 400 each, standard deviation 18; six of them are 107."""
    store.insert_many(make_exemplar(number, 1.5 + 0.01 * number) for number in range(5))
    rng = Random(1)
    counts = Counter(store.draw(TASK, "cpu", rng)[0].candidate_hash for _ in range(2000))
    assert len(counts) == 5
    assert all(abs(count - 400) < 107 for count in counts.values())


@pytest.mark.parametrize(("scale", "width", "temperature"), [("linear", 0.1, 0.5), ("log", 0.2, 0.3)])
def test_pairs_drawn_from_the_server_match_the_closed_form(
    open_store: Callable[..., ExemplarStore], make_exemplar: Callable, scale: str, width: float, temperature: float
) -> None:
    """Unordered pairs of buckets, from the means by hand: P(i, j) = p_i p_j / (1 - p_i) + p_j p_i / (1 - p_j)."""
    store = open_store(bucket_scale=scale, bucket_width=width, temperature=temperature)
    speedups = [0.72, 0.75, 0.78, 1.01, 1.44, 1.46, 2.05]
    store.insert_many(make_exemplar(number, speedup) for number, speedup in enumerate(speedups))
    inside: dict[int, list[float]] = {}
    for speedup in speedups:
        score = math.log(speedup) if scale == "log" else speedup
        inside.setdefault(math.floor(score / width), []).append(score)
    assert len(inside) == 4
    indexes = sorted(inside)
    expected: Counter[tuple[int, ...]] = Counter()
    for pair, share in closed_form([fmean(inside[index]) for index in indexes], temperature).items():
        expected[tuple(sorted(indexes[at] for at in pair))] += share
    rng, draws = Random(11), 4000
    counts = Counter(
        tuple(store.bucketing.index(exemplar.speedup) for exemplar in store.draw(TASK, "cpu", rng))
        for _ in range(draws)
    )
    assert chi_squared(counts, expected, draws) < chi_squared_limit(len(expected) - 1)


def test_bucket_mates_are_the_others_of_one_bucket(store: ExemplarStore, make_exemplar: Callable) -> None:
    store.insert_many(make_exemplar(number, 1.5 + 0.001 * number) for number in range(6))
    store.insert_many([make_exemplar(20, 9.0), make_exemplar(21, 1.502, device_type="H100")])
    one = make_exemplar(2, 1.502)
    mates = store.bucket_mates(one)
    assert [mate.speedup for mate in mates] == [1.5, 1.501, 1.503, 1.504, 1.505]
    assert {mate.device_type for mate in mates} == {"cpu"}
    assert len(store.bucket_mates(one, 2)) == 2
    assert store.bucket_mates(make_exemplar(20, 9.0)) == []


def test_cold_start(store: ExemplarStore, make_exemplar: Callable) -> None:
    assert store.draw(TASK, "cpu", Random(0)) == []
    assert store.best(TASK, "cpu") is None
    store.insert_many([make_exemplar(1, 1.51), make_exemplar(2, 1.52)])
    assert len(store.draw(TASK, "cpu", Random(0))) == 1


def test_devices_and_protocols_never_mix(store: ExemplarStore, make_exemplar: Callable) -> None:
    store.insert(make_exemplar(1, 9.0, device_type="A100"))
    store.insert_many([make_exemplar(1, 1.2), make_exemplar(2, 1.4), make_exemplar(3, 7.0, protocol="reward")])
    assert store.best(TASK, "H100") is None
    assert [best and best.speedup for best in (store.best(TASK, "A100"), store.best(TASK, "cpu"))] == [9.0, 1.4]
    assert store.best(TASK, "cpu", protocol="reward") == make_exemplar(3, 7.0, protocol="reward")
    assert {exemplar.speedup for exemplar in store.draw(TASK, "cpu", Random(0))} == {1.2, 1.4}


@pytest.mark.parametrize("strategy", ["random", "none"])
def test_the_other_strategies_reach_the_server(
    open_store: Callable[..., ExemplarStore], make_exemplar: Callable, strategy: str
) -> None:
    store = open_store(strategy=strategy)
    store.insert_many([make_exemplar(1, 1.51), make_exemplar(2, 1.52)])
    drawn = store.draw(TASK, "cpu", Random(0))
    assert [exemplar.speedup for exemplar in drawn] == ([1.51, 1.52] if strategy == "random" else [])


def test_caps_keep_the_best_the_newest_and_a_sample(
    open_store: Callable[..., ExemplarStore], make_exemplar: Callable
) -> None:
    """A bucket limited to 2 + 3 + 4 is cut at the 12th arrival (more than 9 * 1.25): at most 9 of 12 are left."""
    store = open_store(caps={"best": 2, "newest": 3, "random": 4})
    exemplars = [make_exemplar(number, 1.599 - 0.001 * number) for number in range(12)]
    results = store.insert_many(exemplars)
    assert [result.capped > 0 for result in results] == [False] * 11 + [True]
    wanted = {exemplar.candidate_hash for exemplar in exemplars[:2] + exemplars[-3:]}
    wanted |= set(sorted(exemplar.candidate_hash for exemplar in exemplars)[:4])
    assert {exemplar.candidate_hash for exemplar in store.top(TASK, "cpu", 99)} == wanted
    (bucket,) = store.shelves(TASK)[CPU]
    assert bucket.count == len(wanted) == 12 - results[-1].capped
    assert bucket.mean == pytest.approx(sum(e.speedup for e in exemplars if e.candidate_hash in wanted) / len(wanted))


def test_thirty_two_writers_leave_exact_counts(server: object, open_store: Callable, make_exemplar: Callable) -> None:
    """32 writers insert the same 40 kernels in different orders: each is new once, and the buckets add up."""
    stores = [open_store() for _ in range(32)]
    exemplars = [make_exemplar(number, 1.0 + 0.01 * number) for number in range(40)]

    def write(seed: int) -> int:
        order = Random(seed).sample(exemplars, len(exemplars))
        return sum(stores[seed].insert(exemplar).new for exemplar in order)

    with ThreadPoolExecutor(32) as writers:
        assert sum(writers.map(write, range(32))) == 40
    buckets = stores[0].shelves(TASK)[CPU]
    assert [bucket.count for bucket in buckets] == [10, 10, 10, 10]
    assert buckets[0].mean == pytest.approx(1.045)


def test_cache_answers_the_same_key_only(store: ExemplarStore, make_scored: Callable) -> None:
    scored: ScoredSample = make_scored("p", 0)
    evaluation = scored.evaluation
    assert evaluation is not None
    key = CacheKey.of(evaluation)
    assert store.cached(key) is None
    assert store.cache(key, evaluation, scored.sample.candidate)
    assert store.cached(key) == evaluation
    for change in ({"device_type": "H100"}, {"precision": "fp16"}, {"protocol": "paper"}, {"rules": "any"}):
        assert store.cached(key._replace(**change)) is None
    with pytest.raises(StoreUsageError, match="not of"):
        store.cache(key._replace(protocol="paper"), evaluation)


def test_cache_forgets_unscored_and_other_evaluators(store: ExemplarStore, make_scored: Callable) -> None:
    unscored = make_scored("p", 0, "unscored").evaluation
    assert not store.cache(CacheKey.of(unscored), unscored)
    assert store.cached(CacheKey.of(unscored)) is None
    scored = make_scored("p", 1).evaluation
    old = scored.model_copy(update={"versions": scored.versions.model_copy(update={"evaluator": "0"})})
    assert store.cache(CacheKey.of(old), old)
    assert store.cached(CacheKey.of(old)) is None


@pytest.mark.parametrize(("settings", "words"), [({"bucket_width": 0.2}, "buckets of width 0.1")])
def test_another_bucketing_is_refused(
    open_store: Callable[..., ExemplarStore], settings: dict[str, object], words: str
) -> None:
    open_store()
    with pytest.raises(StoreUsageError, match=words):
        open_store(**settings)


@pytest.mark.parametrize("schema", ["0", "3", "x", ""])
def test_an_unknown_schema_is_refused(store: ExemplarStore, open_store: Callable, schema: str) -> None:
    store.connection.call("HSET", store.keys.store("meta"), "schema", schema)
    with pytest.raises(UnknownSchema, match=f"has schema {schema}"):
        open_store()


@pytest.mark.parametrize(
    ("location", "error", "words"),
    [
        ("redis://127.0.0.1:1/0", StoreUnreachable, "does not answer"),
        ("unix:///nowhere/s.sock", StoreUnreachable, "does not answer"),
        ("http://localhost", StoreUsageError, "not a store"),
        ("redis://host:port", StoreUsageError, "not a valid URL"),
        ("redis+sentinel://host:1", StoreUsageError, "must name the master"),
        ("", StoreUsageError, "no store is named"),
        ("/proc/nowhere", StoreError, "cannot hold a store"),
    ],
)
def test_a_store_that_cannot_be_reached_is_one_sentence(location: str, error: type[Exception], words: str) -> None:
    from exemplar_store import StoreConfig

    with pytest.raises(error, match=words) as caught:
        ExemplarStore.connect(location, StoreConfig(retries=1, retry_cap_s=0.05))
    assert "\n" not in str(caught.value)


def test_a_password_stays_out_of_messages() -> None:
    from exemplar_store import StoreConfig

    with pytest.raises(StoreUnreachable) as caught:
        ExemplarStore.connect("redis://me:secret@127.0.0.1:1/0", StoreConfig(retries=0))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("task_hash", ["", "x", "A" * 64, "a" * 63 + "}"])
def test_what_is_no_task_hash_is_refused(store: ExemplarStore, make_exemplar: Callable, task_hash: str) -> None:
    exemplar: Exemplar = make_exemplar(1).model_copy(update={"task_hash": task_hash})
    with pytest.raises(StoreUsageError, match="content hash"):
        store.insert(exemplar)


def test_a_full_server_refuses_and_writes_nothing(store: ExemplarStore, make_exemplar: Callable) -> None:
    from exemplar_store.errors import StoreFull

    store.insert(make_exemplar(1, 1.5))
    before = store.shelves(TASK)
    store.connection.call("CONFIG SET", "maxmemory", "1")
    try:
        with pytest.raises(StoreFull, match="no memory left"):
            store.insert(make_exemplar(2, 1.5))
        with pytest.raises(StoreFull):
            store.insert_many([make_exemplar(3, 1.5)])
        assert store.best(TASK, "cpu") == make_exemplar(1, 1.5)
    finally:
        store.connection.call("CONFIG SET", "maxmemory", "0")
    assert store.shelves(TASK) == before


def test_without_a_configuration_the_stores_own_buckets_hold(server: EmbeddedServer, make_exemplar: Callable) -> None:
    """The command line is told where a store is, not how it was made. Width 0.25 puts 1.6 in bucket 6."""
    server_store = ExemplarStore.connect(server.url)
    server_store.connection.call("HSET", server_store.keys.store("meta"), "bucket_width", "0.25")
    try:
        with ExemplarStore.connect(server.url) as store:
            assert store.insert(make_exemplar(1, 1.6, task_hash="c" * 64)).bucket == 6
    finally:
        server_store.connection.call("DEL", server_store.keys.store("meta"))
        server_store.close()
