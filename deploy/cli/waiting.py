"""Lines on standard error while an evaluator is waited for, so that no wait is silent.

Invariants: never more than 15 s between two of them while an evaluation lasts, none for what is quicker than 5 s; a
thread that wakes every 10 s is all that it costs the timing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from evaluator.activity import Activity

EVERY_S = 10.0
QUIET_S = 5.0
"""An evaluation this young is not talked about."""


@contextmanager
def waiting_told(activity: Activity, every_s: float = EVERY_S, quiet_s: float = QUIET_S) -> Iterator[None]:
    """Says what is waited for, every `every_s` seconds while the block lasts."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(every_s):
            now = activity.now
            if now is not None and now.outermost().age_s() >= quiet_s:
                typer.echo(now.line(), err=True)

    teller = threading.Thread(target=tell, name="waiting", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
