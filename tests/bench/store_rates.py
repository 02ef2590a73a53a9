"""Rates and sizes of the exemplar store on this machine, as a table, beside what it must reach.

    python tests/bench/store_rates.py [--exemplars 20000] [--tasks 40] [--clients 1] [--simulated 500000] [--soak 20]

The whole table takes about fifteen minutes on two cores that nobody else uses:

    python tests/bench/store_rates.py --exemplars 1000000 --tasks 2000 --simulated 10000000 --soak 300

Two sync policies are compared in one run: what `appendfsync always` costs against `everysec`, pipelined and one at a
time, in turns. Then a draw with its sources, memory per exemplar beyond its compressed source, a restart from the file,
simulated draws against the closed form of Eq. 1, and 64 rollout clients beside 64 writers.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from exemplar_store import EmbeddedServer, ExemplarStore, StoreConfig
from exemplar_store.codec import pack
from exemplar_store.sampling import draw_distinct
from tasks.records import Candidate, Exemplar, Measurement
from tests.bench.store_soak import soak
from tests.exemplar_store.test_sampling import chi_squared, chi_squared_limit, closed_form

BATCH = 4096
OPERATIONS = ["relu", "sigmoid", "tanh", "sum(dim=-1)", "amax(dim=1)", "softmax(dim=-1)", "mean(dim=0)", "exp", "rsqrt"]
MEANS = [0.55, 0.95, 1.04, 1.15, 1.25, 1.62, 2.05, 3.1]
"""Mean speedups of the buckets of the simulated draws, at the default temperature."""
TURNS = 4
"""Times that each sync policy is measured, in turns."""
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


def pipelined(store: ExemplarStore, start: int, count: int, tasks: int) -> float:
    """Inserts per second, many under way at once."""
    batch = list(exemplars(start, count, tasks, seed=start))
    begin = time.perf_counter()
    store.insert_many(batch)
    return count / (time.perf_counter() - begin)


def one_at_a_time(store: ExemplarStore, start: int, count: int, tasks: int) -> float:
    """Inserts per second, each acknowledged before the next."""
    batch = list(exemplars(start, count, tasks, seed=start))
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


def simulate(draws: int, seed: int) -> Counter[tuple[int, ...]]:
    """How often each ordered pair of buckets was drawn."""
    rng = Random(seed)
    return Counter(tuple(draw_distinct(MEANS, 2, StoreConfig().temperature, rng)) for _ in range(draws))


def report_rates(server: EmbeddedServer, count: int, tasks: int, clients: int) -> None:
    """Fills the server and prints its rows."""
    with ExemplarStore.connect(server.url, StoreConfig(reply_timeout_s=120)) as store:
        empty = memory(store)
        begin = time.perf_counter()
        share = count // clients
        with ProcessPoolExecutor(clients) as pool:
            jobs = [pool.submit(fill, server.url, client * share, share, tasks) for client in range(clients)]
            done = [job.result() for job in jobs]
        wall = time.perf_counter() - begin
        rates, packed = sum(share / seconds for seconds, _ in done), sum(size for _, size in done)
        row("exemplars, tasks, inserting processes", f"{share * clients:,}, {tasks:,}, {clients}")
        row("insert, pipelined, fsync always", f"{rates:,.0f} /s", "at least 8,000 /s")
        row("  with making the records", f"{share * clients / wall:,.0f} /s")
        row("compressed source", f"{packed / (share * clients):,.0f} B")
        beyond = (memory(store) - empty - packed) / (share * clients)
        row("memory beyond it, per exemplar", f"{beyond:,.0f} B", "at most 1,536 B")
        times = draw_times_ms(store, tasks)
        row("draw of two with sources, median", f"{statistics.median(times):.2f} ms")
        row("draw of two with sources, p99", f"{times[int(len(times) * 0.99)]:.2f} ms", "at most 3 ms")
        report_sync_policies(store, tasks)


def report_sync_policies(store: ExemplarStore, tasks: int) -> None:
    """What syncing before each acknowledgement costs: both policies in turns, medians and their ratio."""
    found: dict[tuple[str, str], list[float]] = {}
    start = 10**8
    for _ in range(TURNS):
        for policy in ("always", "everysec"):
            store.connection.call("CONFIG SET", "appendfsync", policy)
            found.setdefault(("pipelined", policy), []).append(pipelined(store, start, BATCH, tasks))
            found.setdefault(("one at a time", policy), []).append(one_at_a_time(store, start + BATCH, 1000, tasks))
            start += 10**6
    store.connection.call("CONFIG SET", "appendfsync", "always")
    for way in ("pipelined", "one at a time"):
        always, everysec = (statistics.median(found[way, policy]) for policy in ("always", "everysec"))
        row(f"{way}, always", f"{always:,.0f} /s")
        row(f"{way}, everysec", f"{everysec:,.0f} /s ({everysec / always:.2f} x always)")


def report_simulation(draws: int) -> None:
    """Simulated draws of two buckets against P(i then j) = p_i p_j / (1 - p_i)."""
    cores = os.cpu_count() or 1
    with ProcessPoolExecutor(cores) as pool:
        parts = pool.map(simulate, [draws // cores] * cores, range(cores))
        counts = sum(parts, Counter())
    expected = closed_form(MEANS, StoreConfig().temperature)
    found = chi_squared(counts, expected, counts.total())
    limit = chi_squared_limit(len(expected) - 1)
    row(f"chi-squared of {counts.total():,} draws", f"{found:.1f}", f"at most {limit:.1f}")


def report_soak(seconds: float) -> None:
    """64 clients that draw and 64 that write."""
    outcome = soak(seconds, 4, 16)
    counts = outcome.counts
    row(f"64 drawing, 64 writing, {seconds:g} s", f"{counts['draws']:,} draws, {4 * counts['groups']:,} samples")
    said = "both exact" if not outcome.problems else f"{len(outcome.problems)} problems: {outcome.problems[0]}"
    row("  errors and ledgers", said, "no error, both exact")


def row(name: str, value: str, must_reach: str = "") -> None:
    """One line of the table."""
    print(f"{name:<40} {value:<36} {must_reach}".rstrip(), flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exemplars", type=int, default=20_000)
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--clients", type=int, default=1, help="processes that insert at the same time")
    parser.add_argument("--simulated", type=int, default=500_000, help="simulated draws; 0 leaves them out")
    parser.add_argument("--soak", type=float, default=20.0, help="seconds of the 128 clients; 0 leaves them out")
    options = parser.parse_args()
    row("", "measured", "must reach")
    with tempfile.TemporaryDirectory(prefix="kontrast-bench-") as folder:
        with EmbeddedServer(folder) as server:
            report_rates(server, options.exemplars, options.tasks, options.clients)
        begin = time.perf_counter()
        with EmbeddedServer(folder, start_timeout_s=600):
            row("restart from the append-only file", f"{time.perf_counter() - begin:.1f} s", "at most 60 s")
    if options.simulated:
        report_simulation(options.simulated)
    if options.soak:
        report_soak(options.soak)
    row(
        "load of the machine (1, 5, 15 min), cores",
        f"{', '.join(f'{x:.1f}' for x in os.getloadavg())}; {os.cpu_count()}",
    )


if __name__ == "__main__":
    main()
