"""A/A controls: evaluations of references against themselves, by device type and protocol.

Invariants: adding one again changes nothing; the newest `KEPT` of each device type and protocol stay; what an earlier
version of the evaluator measured is not given out.
"""

from __future__ import annotations

from exemplar_store.codec import pack, read
from exemplar_store.keys import Shelf
from exemplar_store.store import ExemplarStore
from tasks.records import Evaluation
from tasks.version import EVALUATOR_VERSION

KEPT = 1000


class Controls:
    """The controls of a store."""

    def __init__(self, store: ExemplarStore) -> None:
        self._connection = store.connection
        self._keys = store.keys

    def add(self, evaluation: Evaluation, at_s: float) -> None:
        """Keeps one control, made at a Unix time in seconds."""
        key = self._key(evaluation.device_type, evaluation.protocol)
        commands = [
            ("ZADD", key, repr(at_s), pack(evaluation.to_json())),
            ("ZREMRANGEBYRANK", key, 0, -KEPT - 1),
        ]
        self._connection.calls(commands)

    def newest(self, device_type: str, protocol: str, count: int = KEPT) -> list[Evaluation]:
        """At most `count` controls by this version of the evaluator, oldest first."""
        found = self._connection.call("ZRANGE", self._key(device_type, protocol), -count, -1)
        evaluations = [read(Evaluation, data) for data in found]
        return [one for one in evaluations if one.versions.evaluator == EVALUATOR_VERSION]

    def _key(self, device_type: str, protocol: str) -> str:
        shelf = Shelf(device_type, protocol=protocol)  # refuses what cannot be part of a key
        return self._keys.store(f"controls:{shelf.device_type}|{shelf.protocol}")
