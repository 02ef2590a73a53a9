"""A client that dies between any two exchanges with the server leaves nothing half done, and its successor finishes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exemplar_store import ExemplarStore, RunStream
from exemplar_store.config import BucketCaps
from exemplar_store.filed import CacheKey
from exemplar_store.hacking_cases import HackingCase, HackingCases
from exemplar_store.keys import Shelf
from exemplar_store.pruning import pin, prune, prune_evaluations, unpin
from exemplar_store.transfer import export_lines, import_path
from exemplar_store.verify import verify
from tasks.records import Task

TASK = "a" * 64
REFERENCE = "import torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x.sum()\n"
EXCHANGES = ("call", "calls", "script", "scripts")


class Crash(BaseException):
    """The end of the client: no handler sees it."""


def die_after(store: ExemplarStore, exchanges: int) -> Callable[[], None]:
    """The client ends with this exchange: the server has carried it out, the answer is lost. Answers the cure."""
    left = [exchanges]

    def counted(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            answer = exchange(*arguments)
            left[0] -= 1
            if left[0] <= 0:
                raise Crash
            return answer

        return run

    for name in EXCHANGES:
        setattr(store.connection, name, counted(getattr(store.connection, name)))

    def cure() -> None:
        for name in EXCHANGES:
            delattr(store.connection, name)

    return cure


@pytest.fixture
def life(
    tmp_path: Path, make_exemplar: Callable, make_prompt: Callable, make_scored: Callable, exemplar_of: Callable
) -> Callable[[ExemplarStore], None]:
    """Every operation once, as one client may do them; done again from the start, it ends in the same state."""
    other = make_exemplar(70, 2.5, task_hash="b" * 64)

    def live(store: ExemplarStore) -> None:
        store.put_task(Task(id="file:1", source=REFERENCE))
        store.insert(make_exemplar(1, 1.5))
        store.insert_many(make_exemplar(number, 1.0 + number / 100) for number in range(2, 12))
        store.insert(make_exemplar(1, 3.5), replace=True)
        cached = make_scored("seed", 0).evaluation
        store.cache(CacheKey.of(cached), cached)
        HackingCases(store).learn(HackingCase(family="replay", reason="caching", code="x = 1", explanation="None."))
        run = RunStream(store, "run")
        for group in ("p", "q"):
            run.open_group(make_prompt(group), 2)
            scored = make_scored(group, 0, speedup=4.5)
            run.record(scored, exemplar_of(scored))
        run.record(make_scored("p", 1, "rejected"))
        run.cancel(["q/1"])
        run.relay()
        token = run.fence("learner")
        pending = run.claim_all(token) + run.read_scored("learner", 9, 0)
        run.ack([entry for entry, group in pending if group.id == "p"])
        pin(store, "report:1", [make_exemplar(11, 1.11)])
        prune(store, BucketCaps(best=2))
        unpin(store, "report:1")
        prune_evaluations(store)
        file = tmp_path / "import.jsonl"
        if not file.exists():
            file.write_text("\n".join(f'{{"format":"kontrast-store","schema":1,"kind":"exemplar","record":{one.to_json()}}}'
                                      for one in (other, other)))  # fmt: skip
        import_path(store, file)

    return live


def state(store: ExemplarStore) -> tuple[list[str], dict[str, int], list[bytes], dict[bytes, bytes]]:
    """What must not depend on how often the client died: records, the ledgers of samples and groups, open groups."""
    run = store.keys.run
    open_groups = store.connection.call("HGETALL", run("run", "open"))
    pending = [fields[b"group"] for _, fields in store.connection.call("XRANGE", run("run", "scored"), "-", "+")]
    return list(export_lines(store)), RunStream(store, "run").ledger(), pending, open_groups


def test_a_client_that_dies_after_each_exchange_leaves_no_half_work(
    open_store: Callable[..., ExemplarStore], life: Callable[[ExemplarStore], None]
) -> None:
    undisturbed = open_store(namespace="undisturbed")
    life(undisturbed)
    wanted = state(undisturbed)
    assert wanted[1]["in_flight"] == 0
    assert wanted[2:] == ([b"q"], {}), "p is acked, q waits for a checkpoint"
    for exchange in range(1, 200):
        store = open_store(namespace=f"dies{exchange}")
        cure = die_after(store, exchange)
        try:
            life(store)
        except Crash:
            pass
        else:
            assert exchange > 40, "the client has at least forty places to die"
            return
        finally:
            cure()
        assert verify(store, sources=True).problems == [], f"after exchange {exchange}"
        life(open_store(namespace=f"dies{exchange}"))
        assert state(store) == wanted, f"done again after exchange {exchange}"
        assert verify(store).problems == []
        assert store.best(TASK, "cpu").speedup == 4.5
        assert sum(bucket.count for bucket in store.shelves(TASK)[Shelf("cpu")]) == len(store.top(TASK, "cpu", 99))
    pytest.fail("the client never lived to the end")
