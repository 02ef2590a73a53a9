"""Turn taking of roles that share one device or a few cores, as a pure state machine.

Invariants: where the roles share, at most one of them runs at a time (a timing owns its cores); a role that waits gets
its turn after at most one turn of each other role; where they do not share, every role may always run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Role = Literal["generate", "evaluate", "learn"]

ROLES: tuple[Role, ...] = ("generate", "evaluate", "learn")


@dataclass(frozen=True)
class Turns:
    """Whose turn it is, how many units of work of it run, and how many more it may start in this turn."""

    shared: bool
    turn: Role = "generate"
    running: tuple[tuple[Role, int], ...] = tuple((role, 0) for role in ROLES)
    started: int = 0
    """Units started in this turn; what bounds a turn while others wait."""
    quota: int = 64
    """Units that a role may start in one turn while another role waits."""

    def count(self, role: Role) -> int:
        """Units of work of a role that run now."""
        return dict(self.running)[role]

    def may_start(self, role: Role, waiting: Mapping[Role, int]) -> bool:
        """True when a unit of this role may start now, given how many units of each role wait."""
        if not self.shared:
            return True
        return role == self.turn and not self._exhausted(waiting)

    def start(self, role: Role, waiting: Mapping[Role, int]) -> Turns:
        """The state after a unit of this role started; raises ValueError when it may not."""
        if not self.may_start(role, waiting):
            raise ValueError(f"{role} may not start while {self.turn} has its turn")
        return replace(self, running=self._with(role, +1), started=self.started + 1)

    def finish(self, role: Role) -> Turns:
        """The state after a unit of this role ended, however it ended."""
        if self.count(role) < 1:
            raise ValueError(f"no unit of {role} runs")
        return replace(self, running=self._with(role, -1))

    def pass_on(self, waiting: Mapping[Role, int]) -> Turns:
        """Gives the turn to the next role that waits, when the present one has nothing running and is through."""
        if not self.shared or self.count(self.turn) > 0:
            return self
        if waiting.get(self.turn, 0) > 0 and not self._exhausted(waiting):
            return self
        position = ROLES.index(self.turn)
        for step in range(1, len(ROLES) + 1):
            role = ROLES[(position + step) % len(ROLES)]
            if waiting.get(role, 0) > 0:
                return replace(self, turn=role, started=0)
        return self

    def _exhausted(self, waiting: Mapping[Role, int]) -> bool:
        others_wait = any(waiting.get(role, 0) > 0 for role in ROLES if role != self.turn)
        return others_wait and self.started >= self.quota

    def _with(self, role: Role, change: int) -> tuple[tuple[Role, int], ...]:
        return tuple((name, count + change if name == role else count) for name, count in self.running)
