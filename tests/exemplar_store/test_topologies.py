"""The same store on a cluster, behind Sentinel, with a password, and over TLS."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import redis

from exemplar_store import ExemplarStore, RunStream, StoreConfig
from exemplar_store.errors import StoreError, StoreUnreachable
from exemplar_store.server import find_server_binary
from tasks.lifeline import Owned, spawn

QUICK = StoreConfig(retries=3, retry_cap_s=0.2)


def free_port() -> int:
    """A port whose cluster bus port (ten thousand above) exists too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 55_000:
            return port


class Nodes:
    """Servers of one test; all end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[Owned] = []

    def start(self, *options: str) -> int:
        port = free_port()
        home = self.folder / str(port)
        home.mkdir()
        arguments = ["--port", str(port), "--dir", str(home), "--save", "", *options]
        self.running.append(spawn([str(find_server_binary()), *arguments]))
        return self.wait(port)

    def start_sentinel(self, master: int) -> int:
        port = free_port()
        home = self.folder / str(port)
        home.mkdir()
        settings = home / "sentinel.conf"
        settings.write_text(f"port {port}\ndir {home}\nsentinel monitor main 127.0.0.1 {master} 1\n")
        self.running.append(spawn([str(find_server_binary()), str(settings), "--sentinel"]))
        return self.wait(port)

    def wait(self, port: int) -> int:
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return port
            except OSError:
                time.sleep(0.01)
        pytest.fail(f"no server on port {port}")


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="kontrast-test-") as folder:
        group = Nodes(Path(folder))
        yield group
        for node in group.running:
            node.stop()


def start_cluster(nodes: Nodes) -> list[int]:
    """Three masters that share the slots."""
    ports = [nodes.start("--cluster-enabled", "yes", "--appendonly", "yes") for _ in range(3)]
    clients = [redis.Redis(port=port) for port in ports]
    for number, client in enumerate(clients):
        client.execute_command("CLUSTER", "ADDSLOTS", *range(number * 5462, min((number + 1) * 5462, 16384)))
        client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for port in ports[1:]:
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port)
    deadline = time.monotonic() + 30
    while not all(
        "cluster_state:ok" in str(client.execute_command("CLUSTER INFO")) or _ok(client) for client in clients
    ):
        assert time.monotonic() < deadline, "the cluster did not form"
        time.sleep(0.05)
    for client in clients:
        client.close()
    return ports


def _ok(client: redis.Redis) -> bool:
    info = client.execute_command("CLUSTER INFO")
    return isinstance(info, dict) and info.get("cluster_state") == "ok"


def exercise(
    store: ExemplarStore, make_exemplar: Callable, make_prompt: Callable, make_scored: Callable, exemplar_of: Callable
) -> None:
    """Every operation over twelve tasks, whose slots differ."""
    tasks = [f"{number:064x}" for number in range(12)]
    exemplars = [make_exemplar(number, 1.0 + number / 40, task_hash=tasks[number % 12]) for number in range(120)]
    assert all(result.new for result in store.insert_many(exemplars))
    assert not any(result.new for result in store.insert_many(exemplars))
    run = RunStream(store, "run")
    run.append({"n": 1})
    for number, task in enumerate(tasks):
        assert len(store.draw(task, "cpu", Random(0))) == 2
        run.open_group(make_prompt(f"p{number:02}", task_hash=task), 2)
        scored = make_scored(f"p{number:02}", 0, speedup=9.0, task_hash=task)
        assert run.record(scored, exemplar_of(scored)).new_exemplar
        run.cancel([f"p{number:02}/1"])
        assert store.best(task, "cpu").speedup == 9.0
    assert run.relay() == 12
    assert run.ledger()["in_flight"] == 0
    token = run.fence("learner")
    assert run.claim_all(token) == []
    groups = run.read_scored("learner", 99, 1000)
    assert [group.id for _, group in groups] == [f"p{number:02}" for number in range(12)]
    assert run.read_scored("learner", 1, 20) == []
    assert run.ack([entry_id for entry_id, _ in groups]) == 12
    assert list(run.events()) == [{"n": 1}]
    assert set(store.tasks()) == set(tasks)


def test_a_cluster_of_three(
    nodes: Nodes, make_exemplar: Callable, make_prompt: Callable, make_scored: Callable, exemplar_of: Callable
) -> None:
    ports = start_cluster(nodes)
    with ExemplarStore.connect(f"redis://127.0.0.1:{ports[0]}", QUICK) as store:
        exercise(store, make_exemplar, make_prompt, make_scored, exemplar_of)
    keys = []
    for port in ports:
        with redis.Redis(port=port) as client:
            keys.append(int(client.dbsize()))
    assert all(keys), "every node holds some tasks"


def test_a_master_found_by_sentinel(
    nodes: Nodes, make_exemplar: Callable, make_prompt: Callable, make_scored: Callable, exemplar_of: Callable
) -> None:
    sentinel = nodes.start_sentinel(nodes.start())
    with ExemplarStore.connect(f"redis+sentinel://127.0.0.1:{sentinel}/main", QUICK) as store:
        exercise(store, make_exemplar, make_prompt, make_scored, exemplar_of)
    with pytest.raises(StoreUnreachable, match="does not answer"):
        ExemplarStore.connect(f"redis+sentinel://127.0.0.1:{sentinel}/other", QUICK)


def test_a_password_is_used_and_a_wrong_one_is_a_sentence(nodes: Nodes, make_exemplar: Callable) -> None:
    port = nodes.start("--requirepass", "open sesame")
    with ExemplarStore.connect(f"redis://:open%20sesame@127.0.0.1:{port}", QUICK) as store:
        assert store.insert(make_exemplar(1)).new
    for credentials in ("", ":wrong@"):
        with pytest.raises(StoreError, match="refuses this user") as caught:
            ExemplarStore.connect(f"redis://{credentials}127.0.0.1:{port}", QUICK)
        assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
