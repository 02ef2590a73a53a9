"""The key layout: every key of the store is named here and nowhere else.

Invariants: the part in braces decides the cluster slot. All keys of one task share the slot of `{<task hash>}`, so
one script can place an exemplar, move its group and fill the outbox; all keys of one run share `{run:<id>}`; what
belongs to the whole store shares `{store}`. No operation touches two slots at once.

    kontrast:{store}:meta                          hash    schema, bucket scale and width, made by
    kontrast:{store}:tasks                         hash    task hash -> task id
    kontrast:{store}:hacking                       hash    case id -> JSON of a hacking case
    kontrast:{store}:controls:<type>|<protocol>    zset    packed evaluation of the reference against itself, by time
    kontrast:{store}:imports                       hash    fingerprint of a file -> bytes of it that are imported
    kontrast:{<task>}:task                         string  JSON of the task, when it was given
    kontrast:{<task>}:stats                        hash    seq; <shelf>|<bucket>|n and |s (count, micro-score sum)
    kontrast:{<task>}:exemplars:<shelf>            hash    exemplar id -> seq|bucket|micro-score|packed exemplar
    kontrast:{<task>}:scores:<shelf>               zset    exemplar id by speedup: the order within buckets, the best
    kontrast:{<task>}:evaluations:<shelf>          hash    candidate id (:rules) -> packed evaluation with provenance
    kontrast:{<task>}:claims:<shelf>               hash    candidate id -> packed exemplar with a claimed speedup
    kontrast:{<task>}:islands:<shelf>              hash    exemplar id -> islands it is on, as ,0,3,; # -> births
    kontrast:{<task>}:pins                         hash    <shelf>|<exemplar id> -> how many owners refer to it;
                                                           <owner>|<shelf>|<exemplar id> -> 1
    kontrast:{<task>}:best:<run>                   hash    shelf -> lower end of the interval of the run's best on it
    kontrast:{<task>}:group:<run>:<group>          hash    prompt, size, left, s:<sample id> -> packed scored sample
    kontrast:{<task>}:outbox:<run>                 set     complete groups that the relay has not moved yet
    kontrast:{<task>}:done:<run>                   set     groups that the relay has moved
    kontrast:{<task>}:ledger:<run>                 hash    dispatched, accepted, rejected, unscored, cancelled
    kontrast:{run:<id>}:events                     stream  the coordinator's events
    kontrast:{run:<id>}:writers                    hash    writer -> number of its last event, so that none is doubled
    kontrast:{run:<id>}:open                       hash    group id -> task hash, until relayed
    kontrast:{run:<id>}:tasks                      set     task hashes that had a group
    kontrast:{run:<id>}:relayed                    set     group ids in `scored`, now or once
    kontrast:{run:<id>}:scored                     stream  packed scored groups; consumer group `learner`
    kontrast:{run:<id>}:fence:<role>               string  the newest token of a role
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from exemplar_store.errors import StoreUsageError
from tasks.records import Evaluation, Exemplar

SCHEMA_VERSION = 2
"""Raised whenever the layout above or the packed form of a value changes; `migrations` has a step for each."""
EXEMPLAR_ID_DIGITS = 32
"""An exemplar's id on its shelf is this much of its candidate hash: 128 bits."""

_NAME = re.compile(r"^[A-Za-z0-9_.+-]+$")
_RUN_ID = re.compile(r"^[A-Za-z0-9_.:@+-]{1,200}$")
_TASK_HASH = re.compile(r"^[0-9a-f]{64}$")


def exemplar_id(candidate_hash: str) -> str:
    """The id under which a candidate is filed on a shelf."""
    return candidate_hash[:EXEMPLAR_ID_DIGITS]


@dataclass(frozen=True, order=True)
class Shelf:
    """What makes two speedups of one task comparable: GPU type, precision and protocol."""

    device_type: str
    precision: str = "fp32"
    protocol: str = "sequential"

    def __post_init__(self) -> None:
        for part in (self.device_type, self.precision, self.protocol):
            if not _NAME.match(part):
                raise StoreUsageError(f"{part!r} cannot be part of a key: use letters, digits and _ . + -")

    def __str__(self) -> str:
        return f"{self.device_type}|{self.precision}|{self.protocol}"

    @classmethod
    def parse(cls, text: str) -> Shelf:
        """The shelf that `str` gave."""
        device_type, precision, protocol = text.split("|")
        return cls(device_type, precision, protocol)

    @classmethod
    def of(cls, record: Exemplar | Evaluation) -> Shelf:
        """The shelf a record belongs to."""
        protocol = record.protocol if isinstance(record, Evaluation) else record.measurement.protocol
        return _shelf(record.device_type, record.precision, protocol)


_shelf = lru_cache(maxsize=256)(Shelf)  # a store has few shelves, and inserts ask for them by the thousand


@dataclass(frozen=True)
class Keys:
    """Names of all keys under one namespace."""

    namespace: str = "kontrast"

    def store(self, name: str) -> str:
        """A key of the whole store."""
        return f"{self.namespace}:{{store}}:{name}"

    def task(self, task_hash: str, name: str) -> str:
        """A key of one task; refuses anything that is not a content hash (StoreUsageError)."""
        if not _TASK_HASH.match(task_hash):
            raise StoreUsageError(f"{task_hash!r} is not a task's content hash: 64 hex digits are needed")
        return f"{self.namespace}:{{{task_hash}}}:{name}"

    def shelf(self, task_hash: str, name: str, shelf: Shelf) -> str:
        """A key of one task on one shelf."""
        return self.task(task_hash, f"{name}:{shelf}")

    def task_run(self, task_hash: str, name: str, run_id: str) -> str:
        """A key of one task in one run."""
        return self.task(task_hash, f"{name}:{run_id}")

    def group(self, task_hash: str, run_id: str, group_id: str) -> str:
        """The state of one group."""
        return self.task(task_hash, f"group:{run_id}:{group_id}")

    def run(self, run_id: str, name: str) -> str:
        """A key of one run; refuses run ids that would change the slot (StoreUsageError)."""
        if not _RUN_ID.match(run_id):
            raise StoreUsageError(f"run id {run_id!r} is ill-formed: use letters, digits and _ . : @ + -")
        return f"{self.namespace}:{{run:{run_id}}}:{name}"
