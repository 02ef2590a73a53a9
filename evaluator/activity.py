"""What an evaluator does at the moment, for whoever waits for it: the log, a person, the message of a hang.

Invariants: activities nest, and the innermost one counts; an activity ends with its block whatever ends that; another
thread may read at any time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Doing:
    """One activity: its words complete "waiting for"; times are in seconds, `began_s` on the monotonic clock."""

    words: str
    began_s: float
    limit_s: float | None = None
    outer: Doing | None = None

    def age_s(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self.began_s

    def outermost(self) -> Doing:
        """The activity that all others are part of."""
        return self if self.outer is None else self.outer.outermost()

    def line(self) -> str:
        """`waiting for the candidate's first call: 15 s so far, at most 120 s`."""
        limit = "" if self.limit_s is None else f", at most {self.limit_s:.0f} s"
        return f"waiting for {self.words}: {self.age_s():.0f} s so far{limit}"


class Activity:
    """The activities of one evaluator, begun and ended by its own thread."""

    def __init__(self) -> None:
        self.now: Doing | None = None
        """The innermost one; None while nothing is done."""

    @contextmanager
    def doing(self, words: str, limit_s: float | None = None) -> Iterator[None]:
        """Does `words` in the block, for at most `limit_s` seconds where that is known; logs begin and end."""
        before = self.now
        mine = self.now = Doing(words, time.monotonic(), limit_s, before)
        logger.info("begin: %s", words)
        try:
            yield
        finally:
            self.now = before
            logger.info("%.2f s: %s", mine.age_s(), words)
