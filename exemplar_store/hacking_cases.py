"""Hacking cases: known ways to cheat an evaluator, found again by similarity for the reviewing model's prompt.

Invariants: a case is filed once, by its class and normalised code; similarity needs no model and no network, and gives
the same order everywhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property, lru_cache
from importlib import resources
from typing import TYPE_CHECKING, cast

from pydantic import Field, ValidationError

from exemplar_store.errors import StoreUsageError
from exemplar_store.keys import exemplar_id
from exemplar_store.store import ExemplarStore
from tasks.records.base import Record, digest
from tasks.records.evaluation import RejectionReason
from tasks.records.source import normalised_source

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

LONGEST_GRAM = 3
NEARLY_EQUAL = 0.8
"""Similarity from which a cheat found in a run adds nothing to a known case of its family."""
MOST = 500
"""Cases at which runs stop adding theirs."""
CASE_FIELDS = frozenset({"family", "reason", "code", "explanation"})
"""What a line of cases has at least."""


class HackingCase(Record):
    """One way to cheat: what it looks like and why it is no speedup."""

    family: str = Field(min_length=1)
    """Family of the catalogue: `timing_channel`, `deferred_work`, `replay` ..."""
    reason: RejectionReason
    """The word with which the judge rejects it."""
    code: str = Field(min_length=1)
    explanation: str = Field(min_length=1)
    """What the code does instead of the work, and what shows it."""
    origin: str = "kontrast"

    @cached_property
    def id(self) -> str:
        """32 hex digits over family and normalised code."""
        return exemplar_id(digest("hacking", self.family, normalised_source(self.code)))


@cache
def _splitter() -> PreTokenizer:
    """Words and single signs, also within strings, where kernels have their CUDA text."""
    from tokenizers.pre_tokenizers import BertPreTokenizer

    return cast("PreTokenizer", BertPreTokenizer())


@lru_cache(maxsize=2 * MOST)
def grams(code: str) -> Counter[tuple[str, ...]]:
    """Runs of one to three tokens of the code without comments and layout, counted. Shared: not to be changed."""
    tokens = [token for token, _ in _splitter().pre_tokenize_str(normalised_source(code))]
    return Counter(
        tuple(tokens[at : at + length])
        for length in range(1, LONGEST_GRAM + 1)
        for at in range(len(tokens) - length + 1)
    )


def most_similar(code: str, cases: Sequence[HackingCase], count: int = 3) -> list[tuple[HackingCase, float]]:
    """The cases nearest to a code, best first, with their similarity in [0, 1].

    Cosine of token runs weighted by how rare a run is among the cases (tf-idf with logarithmic term frequency), so
    that what every kernel has (`class ModelNew`, `def forward`) counts for little.
    """
    counted = [grams(case.code) for case in cases]
    spread = Counter(gram for grams_of_case in counted for gram in grams_of_case)
    rarity = {gram: math.log((1 + len(cases)) / held) for gram, held in spread.items()}
    wanted = _weigh(grams(code), rarity)
    scored = [(_cosine(wanted, _weigh(grams_of_case, rarity)), case) for grams_of_case, case in zip(counted, cases)]  # noqa: B905
    scored.sort(key=lambda found: (-found[0], found[1].id))
    return [(case, similarity) for similarity, case in scored[:count]]


def _weigh(counts: Counter[tuple[str, ...]], rarity: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    return {gram: (1 + math.log(count)) * rarity[gram] for gram, count in counts.items() if gram in rarity}


def _cosine(first: dict[tuple[str, ...], float], second: dict[tuple[str, ...], float]) -> float:
    dot = math.fsum(weight * second[gram] for gram, weight in first.items() if gram in second)
    norm = math.sqrt(math.fsum(w * w for w in first.values()) * math.fsum(w * w for w in second.values()))
    return min(1.0, dot / norm) if norm else 0.0


class HackingCases:
    """The cases of a store."""

    def __init__(self, store: ExemplarStore) -> None:
        self._connection = store.connection
        self._key = store.keys.store("hacking")

    def seed(self) -> int:
        """Files the cases that come with the package; how many were new."""
        text = (resources.files("exemplar_store") / "hacking_cases.jsonl").read_text()
        return self.add(read_cases(text.splitlines()))

    def add(self, cases: Iterable[HackingCase]) -> int:
        """Files cases; how many were new."""
        return sum(self._connection.calls([("HSETNX", self._key, case.id, case.to_json()) for case in cases]))

    def learn(self, case: HackingCase) -> bool:
        """Files a cheat that a run has found, unless a known case of its family is nearly equal; whether it was new."""
        known = self.all()
        ranked = most_similar(case.code, known, len(known))
        alike = any(one.family == case.family and near >= NEARLY_EQUAL for one, near in ranked)
        return len(known) < MOST and not alike and self.add([case]) == 1

    def all(self) -> list[HackingCase]:
        """Every case, by id."""
        found = self._connection.call("HGETALL", self._key)
        return [HackingCase.from_json(found[id]) for id in sorted(found)]

    def similar(self, code: str, count: int = 3) -> list[tuple[HackingCase, float]]:
        """The filed cases nearest to a code, best first, with their similarity in [0, 1]."""
        return most_similar(code, self.all(), count)


def read_cases(lines: Iterable[str]) -> Iterator[HackingCase]:
    """Cases from JSON lines; raises StoreUsageError naming the first line that is none."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield HackingCase.from_json(line)
            except ValidationError as error:
                problem = error.errors()[0]
                where = ".".join(str(part) for part in problem["loc"]) or "the line"
                raise StoreUsageError(f"line {number} is no hacking case: {where}: {problem['msg']}") from error
