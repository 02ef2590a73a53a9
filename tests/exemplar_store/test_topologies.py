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
from exemplar_store.config import BucketCaps
from exemplar_store.connection import read_sentinel_url
from exemplar_store.contents import stats
from exemplar_store.controls import Controls
from exemplar_store.errors import StoreError, StoreUnreachable
from exemplar_store.hacking_cases import HackingCases
from exemplar_store.keys import Shelf
from exemplar_store.pruning import pin, prune, unpin
from exemplar_store.transfer import export_lines
from exemplar_store.verify import verify
from tasks.lifeline import Owned, spawn
from tasks.records import Evaluation, Exemplar

QUICK = StoreConfig(retries=3, retry_cap_s=0.2)


def free_port() -> int:
    """A port whose cluster bus port (ten thousand above) exists too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 55_000:
            return port


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited 30 s in vain"
        time.sleep(0.05)


class Nodes:
    """Servers of one test; all end with it."""

    def __init__(self, folder: Path, program: Path) -> None:
        self.folder = folder
        self.program = program
        self.running: list[Owned] = []

    def start(self, *options: str) -> int:
        port = free_port()
        home = self.folder / str(port)
        home.mkdir()
        arguments = ["--port", str(port), "--dir", str(home), "--save", "", *options]
        self.running.append(spawn([str(self.program), *arguments]))
        return self.wait(port)

    def start_sentinel(self, master: int, *settings: str) -> int:
        port = free_port()
        home = self.folder / str(port)
        home.mkdir()
        lines = [f"port {port}", f"dir {home}", f"sentinel monitor main 127.0.0.1 {master} 1", *settings]
        file = home / "sentinel.conf"
        file.write_text("\n".join(lines) + "\n")
        self.running.append(spawn([str(self.program), str(file), "--sentinel"]))
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
def nodes(server_program: Path) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="kontrast-test-") as folder:
        group = Nodes(Path(folder), server_program)
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
    wait_until(
        lambda: all(
            "cluster_state:ok" in str(client.execute_command("CLUSTER INFO")) or _ok(client) for client in clients
        )
    )
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
    administer(store, exemplars, make_exemplar)


def administer(store: ExemplarStore, exemplars: list[Exemplar], make_exemplar: Callable) -> None:
    """What the command line does, on the store that `exercise` filled: 120 exemplars and one more of each task."""
    assert HackingCases(store).seed() == len(HackingCases(store).all())
    Controls(store).add(Evaluation(outcome="unscored", reason="device_fault", step="time", task_id="t", task_hash="h",
                                   candidate_hash="c"), 1.0)  # fmt: skip
    assert len(Controls(store).newest("cpu", "sequential")) == 1
    counted = stats(store)
    assert (counted.tasks, counted.exemplars, counted.runs) == (12, {"cpu|fp32|sequential": 132}, ["run"])
    assert counted.memory_bytes
    assert verify(store, sources=True).problems == []
    lines = list(export_lines(store))
    assert len(lines) == len(HackingCases(store).all()) + 132 + counted.evaluations
    assert lines == list(export_lines(store))
    task = exemplars[0].task_hash
    store.insert_many(make_exemplar(500 + number, 1.01 + number / 100, task_hash=task) for number in range(3))
    assert pin(store, "report:run", exemplars[:1]) == 1
    assert prune(store, BucketCaps(best=1)) == 2, "of four the pinned and the best stay"
    assert exemplars[0] in store.top(task, "cpu", 99)
    assert unpin(store, "report:run") == 1
    assert verify(store).problems == []


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


def test_a_store_goes_on_with_the_master_that_sentinel_promotes(nodes: Nodes, make_exemplar: Callable) -> None:
    """With passwords on the servers and on the sentinel, as in use; the replica has what the dead master had."""
    secret = ("--requirepass", "open:sesame", "--masterauth", "open:sesame", "--repl-diskless-sync-delay", "0")
    master = nodes.start(*secret)
    replica = nodes.start("--replicaof", "127.0.0.1", str(master), *secret)
    sentinel = nodes.start_sentinel(
        master, "sentinel auth-pass main open:sesame", "sentinel down-after-milliseconds main 300",
        "sentinel failover-timeout main 2000", "requirepass watch",
    )  # fmt: skip
    url = f"redis+sentinel://:open%3Asesame@127.0.0.1:{sentinel}/main?sentinel_password=watch"
    with redis.Redis(port=sentinel, password="watch") as client:
        wait_until(lambda: client.sentinel_master("main")["num-slaves"] == 1)
    with ExemplarStore.connect(url, StoreConfig(retries=80, retry_cap_s=0.5)) as store:
        store.insert_many(make_exemplar(number) for number in range(20))
        assert store.connection.call("WAIT", 1, 25_000) == 1
        nodes.running[0].stop()
        assert store.insert(make_exemplar(99, 7.0)).new
        assert store.connection.call("CONFIG GET", "port")["port"] == str(replica)
        assert [bucket.count for bucket in store.shelves("a" * 64)[Shelf("cpu")]] == [20, 1]


@pytest.mark.parametrize(
    ("url", "addresses", "sentinel", "master"),
    [
        ("redis+sentinel://a:1,b/main", [("a", 1), ("b", 26379)], {}, {}),
        ("redis+sentinel://me:p%40ss@[::1]:2/main/3", [("::1", 2)], {},
         {"username": "me", "password": "p@ss", "db": 3}),
        ("rediss+sentinel://:p@a/main?ssl_ca_certs=/ca.pem&sentinel_username=s&sentinel_password=q", [("a", 26379)],
         {"ssl": True, "ssl_ca_certs": "/ca.pem", "username": "s", "password": "q"},
         {"ssl": True, "ssl_ca_certs": "/ca.pem", "password": "p"}),
    ],
)  # fmt: skip
def test_sentinel_urls_by_hand(url: str, addresses: list, sentinel: dict, master: dict) -> None:
    place = read_sentinel_url(url)
    assert (place.addresses, place.service) == (addresses, "main")
    assert (place.sentinel_options, place.master_options) == (sentinel, master)


def test_every_node_of_a_cluster_is_checked(nodes: Nodes) -> None:
    """The node that is named keeps everything; another one evicts."""
    ports = start_cluster(nodes)
    with redis.Redis(port=ports[2]) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreError, match=f"node 127.0.0.1:{ports[2]}.* evicts keys"):
        ExemplarStore.connect(f"redis://127.0.0.1:{ports[0]}", QUICK)


def test_a_password_is_used_and_a_wrong_one_is_a_sentence(nodes: Nodes, make_exemplar: Callable) -> None:
    port = nodes.start("--requirepass", "open sesame")
    with ExemplarStore.connect(f"redis://:open%20sesame@127.0.0.1:{port}", QUICK) as store:
        assert store.insert(make_exemplar(1)).new
    for credentials in ("", ":wrong@"):
        with pytest.raises(StoreError, match="refuses this user") as caught:
            ExemplarStore.connect(f"redis://{credentials}127.0.0.1:{port}", QUICK)
        assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
