"""64 rollout clients and 64 writers on one server: no error, both ledgers exact.

    python tests/bench/store_soak.py [--seconds 20] [--processes 4] [--threads 16]

Each process has as many threads that draw as threads that write; each thread has a connection of its own. A writer
opens groups of four samples and records them, some twice, under caps; every eighth group it relays. Ends with 1 and
what is wrong when anything is.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from exemplar_store import EmbeddedServer, ExemplarStore, RunStream, StoreConfig
from exemplar_store.verify import verify
from tasks.records import Candidate, Evaluation, Exemplar, Measurement, Prompt, Sample, ScoredSample

RUN, SIZE = "soak", 4
TASKS = [f"{number:064x}" for number in range(50)]
CONFIG = StoreConfig.model_validate({"caps": {"best": 20, "newest": 20, "random": 20}})


@dataclass
class Outcome:
    """What the clients counted themselves, and what is wrong with the store's account of it."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def soak(seconds: float, processes: int, threads: int) -> Outcome:
    """Runs the clients against a server of their own and compares its ledgers with theirs."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="kontrast-bench-") as folder, EmbeddedServer(folder) as server:
        end = time.time() + seconds
        with ProcessPoolExecutor(processes) as pool:
            jobs = [pool.submit(clients, server.url, process, threads, end) for process in range(processes)]
            for job in jobs:
                counts, errors = job.result()
                outcome.counts.update(counts)
                outcome.problems += errors
        with ExemplarStore.connect(server.url) as store:
            outcome.problems += differences(store, outcome.counts)
    return outcome


def differences(store: ExemplarStore, counts: Counter[str]) -> list[str]:
    """Where the store's ledgers of samples and groups, or its indexes, differ from what the clients did."""
    run, problems = RunStream(store, RUN), []
    run.relay()
    wanted = {name: counts[name] for name in ("accepted", "rejected", "cancelled")}
    wanted |= {"dispatched": SIZE * counts["groups"], "unscored": 0, "in_flight": 0}
    ledger = run.ledger()
    if ledger != wanted:
        problems.append(f"the ledger of samples is {ledger}, the clients have {wanted}")
    run.claim_all(run.fence("learner"))
    seen: list[str] = []
    while groups := run.read_scored("learner", 200, 0):
        seen += [group.id for _, group in groups]
        problems += [f"group {group.id} has {len(group.samples)}" for _, group in groups if len(group.samples) != SIZE]
        run.ack([entry_id for entry_id, _ in groups])
    if not len(seen) == len(set(seen)) == counts["groups"]:
        problems.append(f"{len(seen)} groups came, {len(set(seen))} different ones, {counts['groups']} were formed")
    return problems + verify(store).problems


def clients(url: str, process: int, threads: int, end: float) -> tuple[Counter[str], list[str]]:
    """The threads of one process until a Unix time: what they did, and their errors."""
    counts: Counter[str] = Counter()
    errors: list[str] = []
    lock = threading.Lock()

    def client(which: int) -> None:
        rng, mine, number = random.Random(f"{process}/{which}"), Counter(), 0
        try:
            with ExemplarStore.connect(url, CONFIG) as store:
                while time.time() < end:
                    if which % 2:
                        draw(store, rng, mine)
                    else:
                        write(store, rng, mine, f"{process}-{which}-{number}", relay=number % 8 == 0)
                    number += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the soak looks for
            errors.append(repr(error))
        with lock:
            counts.update(mine)

    running = [threading.Thread(target=client, args=(which,)) for which in range(2 * threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return counts, errors


def draw(store: ExemplarStore, rng: random.Random, mine: Counter[str]) -> None:
    """What a rollout client does: two exemplars with their sources, of different buckets."""
    drawn = store.draw(rng.choice(TASKS), "cpu", rng)
    if len({store.bucketing.index(exemplar.speedup) for exemplar in drawn}) != len(drawn):
        raise AssertionError(f"two exemplars of one bucket: {drawn}")
    mine["draws"] += 1


def write(store: ExemplarStore, rng: random.Random, mine: Counter[str], group: str, *, relay: bool) -> None:
    """What the scoring side does with one group."""
    task, run = rng.choice(TASKS), RunStream(store, RUN)
    prompt = Prompt(id=group, run_id=RUN, task_id=task[-8:], task_hash=task, device_type="cpu", text="")
    run.open_group(prompt, SIZE)
    for index in range(SIZE):
        candidate = Candidate(source=f"group, index = {group!r}, {index}")
        sample = Sample(id=f"{group}/{index}", prompt_id=group, index=index, text="", candidate=candidate)
        kind = rng.choice(("accepted", "rejected", "cancelled"))
        if kind == "cancelled":
            run.cancel([sample.id])
        else:
            scored, exemplar = judged(
                sample, candidate, task, rng.lognormvariate(0.2, 0.4), accepted=kind == "accepted"
            )
            for _ in range(rng.randrange(1, 3)):
                run.record(scored, exemplar)
        mine[kind] += 1
    mine["groups"] += 1
    if relay:
        run.relay()


def judged(
    sample: Sample, candidate: Candidate, task: str, speedup: float, *, accepted: bool
) -> tuple[ScoredSample, Exemplar | None]:
    """The sample with its evaluation, and its exemplar when it is accepted."""
    measurement = Measurement(
        speedup=speedup, ci_low=speedup * 0.98, ci_high=speedup * 1.02, reference_ms=1.0, candidate_ms=1 / speedup,
        pairs=20,
    )  # fmt: skip
    evaluation = Evaluation(
        outcome="accepted" if accepted else "rejected", reason=None if accepted else "incorrect", step="time",
        task_id=task[-8:], task_hash=task, candidate_hash=candidate.content_hash,
        measurement=measurement if accepted else None,
    )  # fmt: skip
    exemplar = Exemplar(
        task_id=task[-8:], task_hash=task, device_type="cpu", source=candidate.source, speedup=speedup,
        candidate_hash=candidate.content_hash, measurement=measurement,
    )  # fmt: skip
    return ScoredSample(sample=sample, evaluation=evaluation), exemplar if accepted else None


def main() -> None:
    """Prints what the clients did; exit code 1 when anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--threads", type=int, default=16, help="of each kind in each process")
    options = parser.parse_args()
    outcome = soak(options.seconds, options.processes, options.threads)
    print(", ".join(f"{count:,} {name}" for name, count in sorted(outcome.counts.items())))
    for problem in outcome.problems[:20]:
        print(problem)
    print("both ledgers exact" if not outcome.problems else f"{len(outcome.problems)} problems")
    sys.exit(bool(outcome.problems))


if __name__ == "__main__":
    main()
