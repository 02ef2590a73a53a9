"""The strategy `islands`: separate populations with resets, as FunSearch evolves programs.

A prompt shows exemplars of one island, drawn from it by Eq. 1, and what its samples find is born there. After a number
of births at a task, the worse half of its islands is emptied, and each gets the best exemplar of a surviving one as its
founder (FunSearch, Romera-Paredes et al. 2023, "Islands-based evolution").

Choices that the method leaves open, and ours: exemplars that no island bore (seeds, imports, what other strategies
found) are on every island and stay there through resets; exemplars are never deleted, an emptied island only forgets
them; ties between islands are broken at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from exemplar_store.buckets import MICRO, Bucket, Bucketing
from exemplar_store.sampling import Strategy

EVERYWHERE = "-"
"""In place of a founder's id: the founder is on all islands anyway."""
ARRIVALS = b"#"


@dataclass(frozen=True)
class Population:
    """One shelf as the islands see it."""

    speedups: Mapping[str, float]
    """Exemplar id -> speedup."""
    homes: Mapping[str, frozenset[int]]
    """Exemplar id -> islands it is on; one that is missing is on all."""
    arrivals: int = 0
    """Births since the last reset."""

    def on(self, island: int) -> dict[str, float]:
        """The exemplars of one island."""
        return {id: speed for id, speed in self.speedups.items() if id not in self.homes or island in self.homes[id]}


def read_population(scores: Sequence[bytes], islands: Mapping[bytes, bytes]) -> Population:
    """From a shelf's `scores` (id, speedup, id, speedup ...) and its `islands` hash."""
    homes = {
        id.decode(): frozenset(int(number) for number in value.decode().split(",") if number)
        for id, value in islands.items()
        if id != ARRIVALS
    }
    speedups = {scores[at].decode(): float(scores[at + 1]) for at in range(0, len(scores), 2)}
    return Population(speedups, homes, int(islands.get(ARRIVALS, b"0")))


def choose_ids(
    members: Mapping[str, float], strategy: Strategy, bucketing: Bucketing, count: int, rng: Random
) -> list[str]:
    """At most `count` exemplars of one island by a strategy over its buckets, in the order drawn."""
    ordered = sorted(members, key=lambda id: (members[id], id))
    inside: dict[int, list[str]] = {}
    index, high = 0, 0.0
    for id in ordered:
        if members[id] >= high:  # the first of its bucket, since they come in order
            index = bucketing.index(members[id])
            high = bucketing.high(index)
        inside.setdefault(index, []).append(id)
    buckets = [
        Bucket(index, len(ids), sum(bucketing.micro_score(members[id]) for id in ids) / len(ids) / MICRO)
        for index, ids in sorted(inside.items())
    ]
    return [inside[pick.bucket][pick.place] for pick in strategy.choose(buckets, count, rng)]


def plan_reset(population: Population, islands: int, rng: Random) -> list[tuple[int, str]]:
    """The islands to empty, each with its founder's id: the worse half by best speedup, the best of a survivor."""
    best: dict[int, tuple[float, str]] = {}
    for island in range(islands):
        members = population.on(island)
        best[island] = max(((speed, id) for id, speed in members.items()), default=(0.0, ""))
    order = sorted(range(islands), key=lambda island: (best[island][0], rng.random()))
    emptied, survivors = order[: islands // 2], order[islands // 2 :]
    plan = []
    for island in emptied:
        founder = best[rng.choice(survivors)][1]
        plan.append((island, founder if founder in population.homes else EVERYWHERE))
    return plan


@dataclass
class DrawnIslands:
    """Which island recent draws came from, so that a prompt's samples are born where its exemplars live."""

    limit: int = 64
    """Draws remembered per task; between a draw and its group's opening there are few."""
    _draws: dict[str, list[tuple[frozenset[str], int]]] = field(default_factory=dict)

    def remember(self, task_hash: str, candidate_hashes: frozenset[str], island: int) -> None:
        """Notes a draw."""
        draws = self._draws.setdefault(task_hash, [])
        draws.append((candidate_hashes, island))
        del draws[: -self.limit]

    def home(self, task_hash: str, shown: frozenset[str]) -> int | None:
        """The island of the latest draw that held all shown exemplars; None when no draw did."""
        for candidate_hashes, island in reversed(self._draws.get(task_hash, [])):
            if shown <= candidate_hashes:
                return island
        return None
