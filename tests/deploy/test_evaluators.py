"""The evaluator pool: who gets what, in which order, and on a real cluster with two GPU types."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy import metrics
from deploy.graph import evaluators
from deploy.graph.evaluators import (
    CONFIRMATION,
    EXPLORATION,
    EvaluatorActor,
    EvaluatorPool,
    Gate,
    Loads,
    evaluator_of,
    start_evaluators,
)
from deploy.graph.placement import TYPE_LABEL
from evaluator.timing.statistics import PlacementHistory
from tasks.records import Candidate, Evaluation, Measurement, Task


def test_a_task_stays_home_unless_home_is_busy_and_another_is_idle() -> None:
    """Home of a is 0. Idle: 0. Busy with 1 idle: moves to 1, which is its home from then on. All busy: stays."""
    loads = Loads([0, 0])
    assert loads.choose("a") == 0
    loads.waiting = [1, 0]
    assert loads.choose("a") == 1
    loads.waiting = [0, 0]
    assert loads.choose("a") == 1
    loads.waiting = [1, 2]
    assert loads.choose("a") == 1
    assert loads.choose("a", avoid=1) == 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.lists(st.sampled_from("abc"), max_size=30))
def test_no_evaluator_idles_while_another_gets_a_queue(waiting: list[int], tasks: list[str]) -> None:
    loads = Loads(list(waiting))
    for task in tasks:
        idle = [number for number, count in enumerate(loads.waiting) if count == 0]
        chosen = loads.choose(task)
        if idle:
            assert loads.waiting[chosen] == 0
        loads.waiting[chosen] += 1


def test_a_gate_lets_confirmations_go_first_and_survives_cancelled_waiters() -> None:
    async def go() -> list[str]:
        gate, order = Gate(), []
        await gate.enter(EXPLORATION)

        async def one(name: str, priority: int) -> None:
            await gate.enter(priority)
            order.append(name)
            await asyncio.sleep(0)
            gate.leave()

        waiting = [asyncio.create_task(one(*item)) for item in (
            ("first", EXPLORATION), ("gone", EXPLORATION), ("second", EXPLORATION), ("confirm", CONFIRMATION),
        )]  # fmt: skip
        await asyncio.sleep(0)
        waiting[1].cancel()
        gate.leave()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.wait_for(gate.enter(EXPLORATION), 1)
        return order

    assert asyncio.run(go()) == ["confirm", "first", "second"]


def test_an_evaluator_with_two_places_works_on_two_candidates_and_prefers_the_place_that_knows_the_task() -> None:
    meet = threading.Barrier(2, timeout=10)
    opened: list[list[str]] = []

    class Judge:
        def __init__(self) -> None:
            self.tasks: list[str] = []
            self.history: object = None
            opened.append(self.tasks)

        def evaluate(self, task: Task, candidate: Candidate) -> str:
            self.tasks.append(task.id)
            if candidate.source == "meet":
                meet.wait()
            return task.id

        def close(self) -> None:
            return None

    actor = EvaluatorActor(lambda protocol: Judge(), "", 2)
    one, two = (Task(id=f"file:{n}", source=f"class Model: n = {n}") for n in "12")
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda task: actor.evaluate(task, Candidate(source="meet"), "reward"), (one, two))
        assert list(found) == ["file:1", "file:2"]
    for task in (two, one, one, two):
        actor.evaluate(task, Candidate(source="alone"), "reward")
    assert sorted(map(tuple, opened)) == [("file:1",) * 3, ("file:2",) * 3]


def test_a_gate_lets_so_many_in() -> None:
    async def go() -> None:
        gate = Gate(2)
        await gate.enter(EXPLORATION)
        await gate.enter(EXPLORATION)
        third = asyncio.create_task(gate.enter(EXPLORATION))
        await asyncio.sleep(0)
        assert not third.done()
        gate.leave()
        await asyncio.wait_for(third, 1)

    asyncio.run(go())


def test_a_task_stays_where_it_is_warm_while_a_place_is_free_there() -> None:
    loads = Loads([1, 0], at_once=2, home={"task": 0})
    assert loads.choose("task") == 0
    loads.waiting[0] = 2
    assert loads.choose("task") == 1


class FakeDevice:
    """An evaluator that says which node it measured on."""

    def __init__(self, device_type: str) -> None:
        import ray

        labels = next(n["Labels"] for n in ray.nodes() if n["NodeID"] == ray.get_runtime_context().get_node_id())
        self.asked, self.found = device_type, labels[TYPE_LABEL]
        self.seen: list[str] = []

    def evaluate(self, task: Task, candidate: Candidate) -> Evaluation:
        self.seen.append(candidate.source)
        timing = Measurement(
            speedup=1.5, ci_low=1.4, ci_high=1.6, reference_ms=3, candidate_ms=2, pairs=20, device_type=self.found
        )
        return Evaluation(
            outcome="accepted", step="time", measurement=timing, task_id=task.id, task_hash=task.content_hash,
            candidate_hash=candidate.content_hash, device_type=self.found, facts={"seen": list(self.seen)},
        )  # fmt: skip

    def close(self) -> None:
        return None


@pytest.mark.heavy
def test_two_raylets_two_types_tasks_go_only_to_their_type() -> None:
    """Nodes labelled A100 and H100 with two fake GPUs each; a pool of one A100 and two H100. Each evaluation comes from
    a node of the type asked for, counted per type; candidates of one task reach one evaluator in order."""
    import ray
    from ray import cloudpickle
    from ray.cluster_utils import Cluster

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for kind in ("A100", "H100"):
            cluster.add_node(num_cpus=2, num_gpus=2, labels={TYPE_LABEL: kind})
        ray.init(address=cluster.address, log_to_driver=False)
        make = lambda kind: lambda protocol: FakeDevice(kind)  # noqa: E731
        actors = start_evaluators(ray, {"A100": ["a0"], "H100": ["h0", "h1"]}, "", make, cpus=0.1, gpus=1, restarts=0)
        pool = EvaluatorPool(actors)
        tasks = [Task(id=f"file:{n}", source=f"class Model: n = {n}") for n in range(4)]

        async def go() -> list[Evaluation]:
            return await asyncio.gather(*(
                pool.evaluate(task, Candidate(source=f"{kind} {number}"), kind, "sequential")
                for number in range(6) for task in tasks for kind in ("A100", "H100")
            ))  # fmt: skip

        found = asyncio.run(go())
    finally:
        ray.shutdown()
        cluster.shutdown()
    kinds = ["A100", "H100"] * 24
    assert [evaluation.device_type for evaluation in found] == kinds
    assert Counter(e.device_type for e in found) == {"A100": 24, "H100": 24}
    for evaluation in found:
        seen = [text.split() for text in evaluation.facts["seen"]]
        assert {kind for kind, _ in seen} == {evaluation.device_type}
        assert [int(number) for _, number in seen] == sorted(int(number) for _, number in seen)


def test_a_type_that_no_evaluator_has_is_an_error_not_a_wait() -> None:
    pool = EvaluatorPool({"cpu": [object()]})
    with pytest.raises(KeyError):
        asyncio.run(
            asyncio.wait_for(pool.evaluate(Task(id="x", source="y"), Candidate(source="z"), "H100", "reward"), 5)
        )


def test_an_evaluator_that_died_is_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from deploy.graph import evaluators
    from deploy.graph.handles import WorkerLost

    asked: list[int] = []

    class Actor:
        def __init__(self, number: int) -> None:
            self.evaluate = number

    async def ask(call: Any, *arguments: Any, what: str) -> Any:
        asked.append(call)
        if call == 0:
            raise WorkerLost(what)
        return rejected()

    monkeypatch.setattr(evaluators, "ask", ask)
    pool = EvaluatorPool({"cpu": [Actor(0), Actor(1)]})
    answer = asyncio.run(pool.evaluate(Task(id="x", source="y"), Candidate(source="z"), "cpu", "reward"))
    assert evaluator_of(answer) == "cpu-1"
    assert asked == [0, 1]


class Answers:
    """Stand-in for `ask`: evaluator by number -> its next answers' reasons; the last one stays."""

    def __init__(self, **reasons: list[str]) -> None:
        self.reasons = {int(name[1:]): list(given) for name, given in reasons.items()}
        self.asked: list[int] = []

    async def __call__(self, call: Any, *arguments: Any, what: str) -> Any:
        self.asked.append(call)
        left = self.reasons[call]
        reason = left.pop(0) if len(left) > 1 else left[0]
        if reason == "device_fault":
            return rejected().model_copy(update={"outcome": "unscored", "reason": reason})
        return rejected()


class Numbered:
    def __init__(self, number: int) -> None:
        self.evaluate = number


def test_a_device_that_fails_twice_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A candidate that met a faulty device is judged by another one; after two faults the device gets no more, not
    even controls, and whoever watches is told once."""
    answers = Answers(n0=["device_fault"], n1=["crash"])
    monkeypatch.setattr(evaluators, "ask", answers)
    pool = EvaluatorPool({"cpu": [Numbered(0), Numbered(1)]}, control_every=1)

    async def run() -> list[Evaluation]:
        tasks = [Task(id=f"t{number}", source=f"y{number}") for number in range(6)]
        found = [await pool.evaluate(task, Candidate(source="z"), "cpu", "reward") for task in tasks]
        while (control := await pool.control(tasks[0], "cpu", "reward")) is not None:
            found.append(control)
        return found

    assert {evaluation.reason for evaluation in asyncio.run(run())} == {"crash"}
    assert answers.asked.count(0) == evaluators.FAULTS
    assert caplog.text.count("evaluator cpu-0 is out of use") == 1
    assert metrics.QUARANTINED.labels("cpu")._value.get() == 1


def test_without_a_fit_device_of_the_type_the_run_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluators, "ask", Answers(n0=["device_fault"]))
    pool = EvaluatorPool({"H100": [Numbered(0)]}, attempts=2)
    task, candidate = Task(id="x", source="y"), Candidate(source="z")
    assert asyncio.run(pool.evaluate(task, candidate, "H100", "reward")).reason == "device_fault"
    with pytest.raises(evaluators.DevicesOut, match=r"No device of type H100 is fit.*--resume"):
        asyncio.run(pool.evaluate(task, candidate, "H100", "reward"))


def test_one_fault_takes_no_device_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(n0=["device_fault", "crash"])
    monkeypatch.setattr(evaluators, "ask", answers)
    pool = EvaluatorPool({"H100": [Numbered(0)]})
    for _ in range(3):
        found = asyncio.run(pool.evaluate(Task(id="x", source="y"), Candidate(source="z"), "H100", "reward"))
        assert found.reason == "crash"


def test_an_actor_passes_the_history_on_and_controls_without_a_candidate() -> None:
    class Device:
        history: Any = None
        closed = 0

        def evaluate(self, task: Task, candidate: Candidate) -> Evaluation:
            return rejected(said=f"judged with {self.history}")

        def control(self, task: Task) -> Evaluation:
            return rejected(said=f"control with {self.history}")

        def close(self) -> None:
            Device.closed += 1

    actor = EvaluatorActor(lambda protocol: Device(), "")
    task, history = Task(id="x", source="y"), PlacementHistory(1e-4, 20)
    assert actor.evaluate(task, Candidate(source="z"), "reward", history).detail["said"] == f"judged with {history}"
    assert actor.evaluate(task, None, "reward").detail["said"] == "control with None"
    assert Device.closed == 0
    actor.evaluate(task, Candidate(source="z"), "sequential")
    assert Device.closed == 1


def test_a_control_is_due_on_each_evaluator_after_its_own_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every three evaluations. Evaluator 0 gets five and is due after the third; a control counts for nothing; one that
    dies over its control is due again a round later. Off, none is ever due."""
    from deploy.graph import evaluators
    from deploy.graph.handles import WorkerLost

    asked: list[tuple[Any, ...]] = []
    dead = False

    class Actor:
        def __init__(self, number: int) -> None:
            self.evaluate = number

    async def ask(call: Any, *arguments: Any, what: str) -> Any:
        asked.append((call, *arguments))
        if dead:
            raise WorkerLost(what)
        return rejected()

    monkeypatch.setattr(evaluators, "ask", ask)
    task, candidate, history = Task(id="x", source="y"), Candidate(source="z"), PlacementHistory(1e-4, 20)
    pool = EvaluatorPool({"cpu": [Actor(0), Actor(1)]}, control_every=3)
    pool.histories["cpu"] = history

    async def evaluate(times: int) -> None:
        for _ in range(times):
            await pool.evaluate(task, candidate, "cpu", "reward")

    async def control() -> Evaluation | None:
        return await pool.control(task, "cpu", "reward")

    async def go() -> None:
        nonlocal dead
        await evaluate(2)
        assert await control() is None
        await evaluate(1)
        found = await control()
        assert found is not None
        assert evaluator_of(found) == "cpu-0"
        assert asked[-1] == (0, task, None, "reward", history)
        assert await control() is None, "a control is no evaluation, and evaluator 1 had none"
        await evaluate(3)
        dead = True
        with pytest.raises(WorkerLost):
            await control()
        dead = False
        assert await control() is None
        await evaluate(3)
        assert await control() is not None

    asyncio.run(go())
    off = EvaluatorPool({"cpu": [Actor(0)]})
    asyncio.run(off.evaluate(task, candidate, "cpu", "reward"))
    assert asyncio.run(off.control(task, "cpu", "reward")) is None


def rejected(**detail: str) -> Evaluation:
    return Evaluation(
        outcome="rejected", reason="crash", step="load", task_id="x", task_hash="y", candidate_hash="z", detail=detail
    )  # fmt: skip


@pytest.mark.parametrize(("evaluators", "first", "dead", "asked"), [
    (1, "cpu-0", (), [0]),
    (2, "cpu-0", (), [1]),
    (2, "cpu-1", (), [0]),
    (2, "", (), [0]),
    (2, "cpu-0", (1,), [1, 0]),
    (3, "cpu-0", (1,), [1, 2]),
])  # fmt: skip
def test_a_confirmation_goes_elsewhere_where_there_is_another(
    monkeypatch: pytest.MonkeyPatch, evaluators: int, first: str, dead: tuple[int, ...], asked: list[int]
) -> None:
    """And the task's home stays where it is."""
    from deploy.graph import evaluators as module
    from deploy.graph.handles import WorkerLost

    calls: list[int] = []

    class Actor:
        def __init__(self, number: int) -> None:
            self.evaluate = number

    async def ask(call: Any, *arguments: Any, what: str) -> Any:
        calls.append(call)
        if call in dead:
            raise WorkerLost(what)
        return rejected()

    monkeypatch.setattr(module, "ask", ask)
    pool = EvaluatorPool({"cpu": [Actor(number) for number in range(evaluators)]})
    task, candidate = Task(id="x", source="y"), Candidate(source="z")
    answer = asyncio.run(pool.evaluate(task, candidate, "cpu", "reward", first=rejected(evaluator=first)))
    assert calls == asked
    assert evaluator_of(answer) == f"cpu-{asked[-1]}"
    assert asyncio.run(pool.evaluate(task, candidate, "cpu", "reward")).detail["evaluator"] == "cpu-0" or 0 in dead
