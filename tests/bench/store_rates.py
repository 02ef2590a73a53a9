"""Rates and sizes of the exemplar store on this machine, as a table.

    python tests/bench/store_rates.py [--exemplars 20000] [--tasks 40] [--clients 1]

Two sync policies are compared in one run: what `appendfsync always` costs against `everysec`, pipelined and one at a
time. Then a draw with its sources, memory per exemplar beyond its compressed source, and a restart from the file.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from random import Random

from exemplar_store import EmbeddedServer, ExemplarStore, StoreConfig
from exemplar_store.codec import pack
from tasks.records import Candidate, Exemplar, Measurement

BATCH = 4096
OPERATIONS = ["relu", "sigmoid", "tanh", "sum(dim=-1)", "amax(dim=1)", "softmax(dim=-1)", "mean(dim=0)", "exp", "rsqrt"]
NOUNS = ["block", "row", "tile", "stride", "mask", "partial", "shared", "accumulator", "warp", "offset", "scale"]


def source(rng: Random) -> str:
    """A kernel-like text of about 2.2 kB that packs to about 0.8 kB, as real kernels do."""
    lines = ["import torch", "import torch.nn as nn", "", "class ModelNew(nn.Module):", "    def forward(self, x):"]
    for _ in range(25):
        name, other, operation = rng.choice(NOUNS), rng.choice(NOUNS), rng.choice(OPERATIONS)
        value = f"x[:, {rng.randrange(4096)}:] * {rng.random():.3f}"
        lines.append(
            f"        {name}_{rng.getrandbits(24):x} = torch.{operation}({value}) + {other}_{rng.randrange(64)}"
        )
    return "\n".join(lines)


def exemplars(start: int, count: int, tasks: int, seed: int) -> Iterator[Exemplar]:
    """`count` different exemplars over the tasks in turn; speedups between 0.5 and 20, most of them near 1."""
    rng = Random(seed)
    for number in range(start, start + count):
        speedup = min(20.0, max(0.5, rng.lognormvariate(0.2, 0.5)))
        candidate = Candidate(source=f"{source(rng)}\n# {number}\n")
        yield Exemplar(
            task_id=f"procedural:row_norm/{number % tasks}", task_hash=task_hash(number % tasks), device_type="cpu",
            source=candidate.source, candidate_hash=hashlib.sha256(str(number).encode()).hexdigest(), speedup=speedup,
            measurement=Measurement(
                speedup=speedup, ci_low=speedup * 0.98, ci_high=speedup * 1.02, reference_ms=rng.random() + 0.1,
                candidate_ms=rng.random() + 0.1, pairs=40,
            ),
            origin=f"run/{number}",
        )  # fmt: skip


def task_hash(number: int) -> str:
    """Any 64 digits that differ by task."""
    return hashlib.sha256(f"task {number}".encode()).hexdigest()


def fill(url: str, start: int, count: int, tasks: int) -> tuple[float, int]:
    """Inserts pipelined; seconds spent inserting (making the records is not counted), and bytes of packed source."""
    seconds, packed = 0.0, 0
    with ExemplarStore.connect(url) as store:
        for at in range(start, start + count, BATCH):
            batch = list(exemplars(at, min(BATCH, start + count - at), tasks, seed=at))
            packed += sum(len(pack(exemplar.source)) for exemplar in batch)
            begin = time.perf_counter()
            store.insert_many(batch)
            seconds += time.perf_counter() - begin
    return seconds, packed


def one_at_a_time(store: ExemplarStore, tasks: int, count: int = 2000) -> float:
    """Inserts per second, each acknowledged before the next."""
    batch = list(exemplars(10**8, count, tasks, seed=1))
    store.insert_many(batch[:1])
    begin = time.perf_counter()
    for exemplar in batch:
        store.insert(exemplar)
    return count / (time.perf_counter() - begin)


def draw_times_ms(store: ExemplarStore, tasks: int, count: int = 5000) -> list[float]:
    """Times of two-bucket draws with sources, over random tasks."""
    rng, times = Random(2), []
    for _ in range(count):
        begin = time.perf_counter()
        store.draw(task_hash(rng.randrange(tasks)), "cpu", rng)
        times.append((time.perf_counter() - begin) * 1e3)
    return sorted(times)


def memory(store: ExemplarStore) -> int:
    """Bytes the server has allocated for its data."""
    return int(store.connection.call("INFO", "memory")["used_memory"])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exemplars", type=int, default=20_000)
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--clients", type=int, default=1, help="processes that insert at the same time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kontrast-bench-") as folder:
        with EmbeddedServer(folder) as server:
            report(server, options.exemplars, options.tasks, options.clients)
        begin = time.perf_counter()
        with EmbeddedServer(folder, start_timeout_s=600):
            row("restart from the append-only file", f"{time.perf_counter() - begin:.1f} s")


def report(server: EmbeddedServer, count: int, tasks: int, clients: int) -> None:
    """Fills the server and prints its rows."""
    with ExemplarStore.connect(server.url, StoreConfig(reply_timeout_s=120)) as store:
        empty = memory(store)
        begin = time.perf_counter()
        share = count // clients
        with ProcessPoolExecutor(clients) as pool:
            jobs = [pool.submit(fill, server.url, client * share, share, tasks) for client in range(clients)]
            done = [job.result() for job in jobs]
        wall = time.perf_counter() - begin
        rates = sum(share / seconds for seconds, _ in done)
        row("exemplars, tasks, clients", f"{share * clients:,}, {tasks:,}, {clients}")
        row("insert, pipelined, fsync always", f"{rates:,.0f} /s")
        row("  with making the records", f"{share * clients / wall:,.0f} /s")
        beyond = (memory(store) - empty - sum(packed for _, packed in done)) / (share * clients)
        row("compressed source", f"{sum(packed for _, packed in done) / (share * clients):,.0f} B")
        row("memory beyond it, per exemplar", f"{beyond:,.0f} B")
        always = one_at_a_time(store, tasks)
        row("insert, one at a time, fsync always", f"{always:,.0f} /s")
        times = draw_times_ms(store, tasks)
        row("draw of two with sources, median", f"{statistics.median(times):.2f} ms")
        row("draw of two with sources, p99", f"{times[int(len(times) * 0.99)]:.2f} ms")
        store.connection.call("CONFIG SET", "appendfsync", "everysec")
        batch = list(exemplars(2 * 10**8, BATCH, tasks, seed=3))
        begin = time.perf_counter()
        store.insert_many(batch)
        row("insert, pipelined, fsync everysec", f"{BATCH / (time.perf_counter() - begin):,.0f} /s")
        batch = list(exemplars(3 * 10**8, 2000, tasks, seed=4))
        begin = time.perf_counter()
        for exemplar in batch:
            store.insert(exemplar)
        everysec = len(batch) / (time.perf_counter() - begin)
        row("insert, one at a time, fsync everysec", f"{everysec:,.0f} /s ({everysec / always:.2f} x always)")


def row(name: str, value: str) -> None:
    """One line of the table."""
    print(f"{name:<40} {value}", flush=True)


if __name__ == "__main__":
    main()
