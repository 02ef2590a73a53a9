"""64 rollout clients and 64 writers on one server for minutes: no error, both sides of the ledger exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from exemplar_store import EmbeddedServer, ExemplarStore, RunStream
from exemplar_store.verify import verify

ROOT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("KONTRAST_SOAK_S", "300"))
PROCESSES, THREADS = 4, 16
WORKER = """
import json, random, sys, threading, time
from exemplar_store import ExemplarStore, RunStream, StoreConfig
from tasks.records import Candidate, Evaluation, Exemplar, Measurement, Prompt, Sample, ScoredSample

url, process, threads, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
TASKS = [f"{number:064x}" for number in range(50)]
counts, errors, lock = {"draws": 0, "accepted": 0, "rejected": 0, "cancelled": 0, "groups": 0}, [], threading.Lock()


def measured(speedup):
    return Measurement(speedup=speedup, ci_low=speedup * 0.98, ci_high=speedup * 1.02, reference_ms=1.0,
                       candidate_ms=1 / speedup, pairs=20)


def rollout(store, rng, mine):
    drawn = store.draw(rng.choice(TASKS), "cpu", rng)
    assert len({exemplar.candidate_hash for exemplar in drawn}) == len(drawn)
    mine["draws"] += 1


def write(store, rng, mine, name, number):
    task = rng.choice(TASKS)
    run = RunStream(store, "soak")
    group = f"{name}-{number}"
    run.open_group(Prompt(id=group, run_id="soak", task_id=task[:8], task_hash=task, device_type="cpu", text=""), 4)
    for index in range(4):
        candidate = Candidate(source=f"group, index = {group!r}, {index}")
        sample = Sample(id=f"{group}/{index}", prompt_id=group, index=index, text="", candidate=candidate)
        kind = ("accepted", "rejected", "cancelled")[rng.randrange(3)]
        if kind == "cancelled":
            run.cancel([sample.id])
        else:
            speedup = rng.lognormvariate(0.2, 0.4)
            evaluation = Evaluation(
                outcome=kind, reason="incorrect" if kind == "rejected" else None, step="time", task_id=task[:8],
                task_hash=task, candidate_hash=candidate.content_hash,
                measurement=measured(speedup) if kind == "accepted" else None,
            )
            exemplar = None if kind == "rejected" else Exemplar(
                task_id=task[:8], task_hash=task, device_type="cpu", source=candidate.source, speedup=speedup,
                candidate_hash=candidate.content_hash, measurement=measured(speedup),
            )
            for _ in range(rng.randrange(1, 3)):
                run.record(ScoredSample(sample=sample, evaluation=evaluation), exemplar)
        mine[kind] += 1
    mine["groups"] += 1
    if number % 8 == 0:
        run.relay()


def client(which):
    rng = random.Random(f"{process}/{which}")
    mine = dict.fromkeys(counts, 0)
    try:
        with ExemplarStore.connect(url, StoreConfig(caps={"best": 20, "newest": 20, "random": 20})) as store:
            number = 0
            while time.time() < end:
                if which % 2:
                    rollout(store, rng, mine)
                else:
                    write(store, rng, mine, f"{process}-{which}", number)
                number += 1
    except Exception as error:
        errors.append(repr(error))
    with lock:
        for name, count in mine.items():
            counts[name] += count


clients = [threading.Thread(target=client, args=(which,)) for which in range(2 * threads)]
for one in clients: one.start()
for one in clients: one.join()
print(json.dumps([counts, errors]))
"""


@pytest.mark.slow
def test_128_clients_leave_exact_ledgers() -> None:
    with tempfile.TemporaryDirectory(prefix="kontrast-test-") as folder, EmbeddedServer(folder) as server:
        end = time.time() + SECONDS
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, server.url, str(process), str(THREADS), str(end)], cwd=ROOT, text=True,
                stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            for process in range(PROCESSES)
        ]  # fmt: skip
        totals: dict[str, int] = {}
        for worker in workers:
            out, _ = worker.communicate(timeout=SECONDS + 120)
            counts, errors = json.loads(out)
            assert errors == []
            for name, count in counts.items():
                totals[name] = totals.get(name, 0) + count
        with ExemplarStore.connect(server.url) as store:
            run = RunStream(store, "soak")
            run.relay()
            ledger = run.ledger()
            print(totals, ledger)
            assert ledger["dispatched"] == 4 * totals["groups"]
            assert ledger["in_flight"] == ledger["unscored"] == 0
            assert all(ledger[name] == totals[name] for name in ("accepted", "rejected", "cancelled"))
            token = run.fence("learner")
            run.claim_all(token)
            seen: list[str] = []
            while groups := run.read_scored("learner", 200, 0):
                seen += [group.id for _, group in groups]
                run.ack([entry_id for entry_id, _ in groups])
            assert len(seen) == len(set(seen)) == totals["groups"]
            assert verify(store).problems == []
            assert totals["draws"] > 100
