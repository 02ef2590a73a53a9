"""Where one worker's builds are served: what it asked for, what came of it, and when asking is over.

Invariants: one desk a worker; it serves while the worker loads and warms up and refuses afterwards, so that no build
can hold a timed turn; a failed build keeps the pool's own words, whatever the candidate makes of its exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evaluator.activity import Activity
from evaluator.compile.pool import CompilePool
from evaluator.compile.request import BadRequest, CompileResult
from tasks.records.evaluation import UnscoredReason

MAX_BUILDS = 16
"""Builds of one candidate; more is a loop."""

_UNSCORED: dict[str, UnscoredReason] = {
    "no_space": "no_space", "sandbox_unavailable": "sandbox_unavailable", "evaluator_lost": "evaluator_lost",
}  # fmt: skip


class BuildDesk:
    """Serves `compile` messages; `pool` is asked for when the first one comes."""

    def __init__(self, pool: Callable[[], CompilePool], activity: Activity | None = None) -> None:
        self._pool = pool
        self._activity = activity or Activity()
        self.open = True
        self.results: list[CompileResult] = []

    def serve(self, message: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """The answer and a sealed descriptor of the library, the caller's to close.

        Raises BadRequest for a message off the schema or more builds than a candidate may ask for.
        """
        if not self.open:
            return {"op": "compiled", "ok": False, "name": "", "text": "nothing is built after the first calls"}, None
        if len(self.results) == MAX_BUILDS:
            raise BadRequest(f"more than {MAX_BUILDS} builds")
        with self._activity.doing("a kernel to be compiled (load_inline)"):
            answer, descriptor, result = self._pool().serve(message)
        self.results.append(result)
        return answer, descriptor

    @property
    def failure(self) -> CompileResult | None:
        """The last build, when it failed."""
        return self.results[-1] if self.results and not self.results[-1].ok else None

    @property
    def fault(self) -> UnscoredReason | None:
        """Why the last build says nothing about its candidate: the machine failed."""
        return _UNSCORED.get(self.failure.kind or "") if self.failure is not None else None

    @property
    def routes(self) -> tuple[str, ...]:
        """Names of the routes used: `load_inline` stands for both of torch's functions."""
        return ("load_inline",) if self.results else ()
