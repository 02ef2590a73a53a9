"""Islands: apart from each other, reset by halves, founded by survivors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from exemplar_store import ExemplarStore, RunStream
from exemplar_store.buckets import Bucketing
from exemplar_store.islands import EVERYWHERE, DrawnIslands, Population, choose_ids, plan_reset, read_population
from exemplar_store.sampling import Buckets
from exemplar_store.verify import verify
from tasks.records import Exemplar, Prompt
from tests.exemplar_store.test_sampling import chi_squared, chi_squared_limit, closed_form

TASK = "a" * 64


def test_population_by_hand() -> None:
    population = read_population([b"s", b"1.5", b"x", b"2", b"y", b"3"], {b"x": b",0,3,", b"y": b",", b"#": b"12"})
    assert population.arrivals == 12
    assert population.on(0) == {"s": 1.5, "x": 2.0}
    assert population.on(1) == {"s": 1.5}, "y was on an island that was emptied"


def test_a_reset_empties_the_worse_half_and_founds_it_from_the_better() -> None:
    """Bests 1, 5, 2, 4, 3 of five islands: 0 and 2 are emptied, founders come from 1, 3 and 4."""
    bests = [1.0, 5.0, 2.0, 4.0, 3.0]
    population = Population(
        speedups={f"x{island}": best for island, best in enumerate(bests)} | {"s": 0.5},
        homes={f"x{island}": frozenset({island}) for island in range(5)},
    )
    founders = set()
    for seed in range(50):
        plan = plan_reset(population, 5, Random(seed))
        assert sorted(island for island, _ in plan) == [0, 2]
        founders |= {founder for _, founder in plan}
    assert founders == {"x1", "x3", "x4"}


def test_a_founder_that_is_everywhere_needs_no_move_and_ties_break_at_random() -> None:
    population = Population(speedups={"s": 2.0}, homes={})
    plans = [plan_reset(population, 4, Random(seed)) for seed in range(60)]
    assert {founder for plan in plans for _, founder in plan} == {EVERYWHERE}
    assert {island for plan in plans for island, _ in plan} == {0, 1, 2, 3}
    assert len(plan_reset(Population({}, {}), 5, Random(0))) == 2


def test_ids_are_drawn_from_two_buckets_of_the_island() -> None:
    members = {"a": 1.01, "b": 1.02, "c": 1.55}
    for seed in range(20):
        chosen = choose_ids(members, Buckets(0.5), Bucketing(), 2, Random(seed))
        assert "c" in chosen
        assert len(set(chosen)) == 2
    assert choose_ids({}, Buckets(0.5), Bucketing(), 2, Random(0)) == []


def test_one_island_is_drawn_from_by_eq_1() -> None:
    """Buckets of two, one and one; the exemplars of a bucket share its probability."""
    members = {"a": 1.01, "b": 1.03, "c": 1.55, "d": 2.25}
    expected = closed_form([1.02, 1.55, 2.25], 0.5)
    bucket_of = {"a": 0, "b": 0, "c": 1, "d": 2}
    rng, draws = Random(3), 20_000
    drawn = [choose_ids(members, Buckets(0.5), Bucketing(), 2, rng) for _ in range(draws)]
    counts = Counter(tuple(bucket_of[id] for id in ids) for ids in drawn)
    assert chi_squared(counts, expected, draws) < chi_squared_limit(len(expected) - 1)
    within = Counter(id for ids in drawn for id in ids if id in "ab")
    assert chi_squared(within, {"a": 0.5, "b": 0.5}, within.total()) < chi_squared_limit(1)


def test_drawn_islands_remember_the_latest_fitting_draw() -> None:
    drawn = DrawnIslands(limit=2)
    drawn.remember(TASK, frozenset("ab"), 1)
    drawn.remember(TASK, frozenset("ac"), 2)
    assert drawn.home(TASK, frozenset("a")) == 2, "one exemplar was dropped for lack of room"
    assert drawn.home(TASK, frozenset("ab")) == 1
    assert drawn.home(TASK, frozenset("z")) is None
    drawn.remember(TASK, frozenset("d"), 3)
    assert drawn.home(TASK, frozenset("ab")) is None, "only the last two are kept"


@pytest.fixture
def island_store(open_store: Callable[..., ExemplarStore]) -> ExemplarStore:
    return open_store(strategy="islands", islands=4, island_reset_every=6)


def sample_once(
    run: RunStream, number: int, speedup: float, rng: Random, make_prompt: Callable, make_scored: Callable,
    exemplar_of: Callable,
) -> tuple[list[Exemplar], int | None]:  # fmt: skip
    """Draw, prompt, one sample, record: as a coordinator does."""
    shown = run.store.draw(TASK, "cpu", rng)
    prompt: Prompt = make_prompt(f"p{number}")
    prompt = prompt.model_copy(update={"exemplar_hashes": tuple(exemplar.candidate_hash for exemplar in shown)})
    home = run.store.home_of(prompt)
    run.open_group(prompt, 1)
    scored = make_scored(f"p{number}", 0, speedup=speedup)
    run.record(scored, exemplar_of(scored))
    return shown, home


def test_samples_are_born_where_their_prompt_came_from(
    island_store: ExemplarStore, make_exemplar: Callable, make_prompt: Callable, make_scored: Callable,
    exemplar_of: Callable,
) -> None:  # fmt: skip
    island_store.insert_many([make_exemplar(1, 1.01), make_exemplar(2, 1.21)])
    run, rng = RunStream(island_store, "run"), Random(4)
    homes: dict[str, int | None] = {}
    for number in range(5):
        shown, home = sample_once(run, number, 2.0 + number / 5, rng, make_prompt, make_scored, exemplar_of)
        assert home in range(4)
        for exemplar in shown:
            assert homes.get(exemplar.origin, home) == home, "an exemplar of another island was shown"
        homes[f"p{number}/0"] = home
    assert len(set(homes.values())) > 1
    assert verify(island_store).consistent


def test_a_due_reset_happens_once_and_keeps_every_exemplar(
    island_store: ExemplarStore, make_prompt: Callable, make_scored: Callable, exemplar_of: Callable
) -> None:
    run, rng = RunStream(island_store, "run"), Random(1)
    for number in range(6):
        sample_once(run, number, 1.0 + number / 5, rng, make_prompt, make_scored, exemplar_of)
    key = island_store.shelf_keys(TASK, next(iter(island_store.shelves(TASK))))[-1]
    before = read_population([], island_store.connection.call("HGETALL", key))
    assert before.arrivals == 6
    island_store.draw(TASK, "cpu", rng)
    after = read_population([], island_store.connection.call("HGETALL", key))
    assert after.arrivals == 0
    assert after.homes.keys() == before.homes.keys()
    assert after.homes != before.homes
    assert island_store.connection.script("reset_islands", [key], [6, 0, EVERYWHERE]) == 0, "not due again"
    assert island_store.best(TASK, "cpu").speedup == 2.0


def test_reset_script_by_hand(island_store: ExemplarStore) -> None:
    """Islands 0 and 2 are emptied; x2, on island 1, founds island 0; island 2 gets a founder that is everywhere."""
    key = island_store.keys.task(TASK, "islands:test")
    call = island_store.connection.call
    call("HSET", key, "#", 7, "x1", ",0,", "x2", ",1,", "x3", ",0,2,3,", "x12", ",12,")
    assert island_store.connection.script("reset_islands", [key], [6, 0, "x2", 2, EVERYWHERE]) == 1
    assert call("HGETALL", key) == {b"#": b"0", b"x1": b",", b"x2": b",1,0,", b"x3": b",3,", b"x12": b",12,"}


def test_removed_exemplars_leave_their_island(
    open_store: Callable[..., ExemplarStore], make_prompt: Callable, make_scored: Callable, exemplar_of: Callable
) -> None:
    store = open_store(strategy="islands", caps={"best": 2})
    run, rng = RunStream(store, "run"), Random(1)
    for number in range(6):
        sample_once(run, number, 1.51 + number / 100, rng, make_prompt, make_scored, exemplar_of)
    kept = {exemplar.candidate_hash[:32] for exemplar in store.top(TASK, "cpu", 9)}
    key = store.shelf_keys(TASK, next(iter(store.shelves(TASK))))[-1]
    assert set(read_population([], store.connection.call("HGETALL", key)).homes) == kept
    assert verify(store).consistent
