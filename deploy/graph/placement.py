"""Who runs where: a plan of the roles against a cluster's nodes, and the text that says what is missing.

Invariants: pure, so that `--dry-run` prints what the run itself would do; an evaluator owns its GPU alone unless the
run takes turns on it; the learner's ranks share one node; what asks for a GPU type goes only to nodes of that label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tasks.errors import KontrastError

TYPE_LABEL = "ray.io/accelerator-type"
ROLE_LABEL = "rl-role"
EPSILON = 1e-6


class PlacementError(KontrastError):
    """The cluster cannot hold what the configuration asks for; the text says what to change."""

    exit_code = 2


@dataclass(frozen=True)
class Request:
    """`count` equal actors of a role; resources are per actor, GPUs may be a share below 1."""

    role: str
    count: int
    cpus: float = 1.0
    gpus: float = 0.0
    accelerator_type: str = ""
    """GPU type that the actor must have; empty for any node."""
    one_node: bool = False
    """All actors of the request on one node (NVLink between a learner's ranks)."""
    setting: str = ""
    """The configuration key that asks for them, named in the shortfall."""


@dataclass(frozen=True)
class Node:
    """One node of a cluster with its free resources and Ray labels."""

    id: str
    cpus: float
    gpus: float = 0.0
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def accelerator_type(self) -> str:
        """GPU type by label; empty where there is none."""
        return dict(self.labels).get(TYPE_LABEL, "")

    @property
    def role(self) -> str:
        """Role that the node is reserved for; empty for any."""
        return dict(self.labels).get(ROLE_LABEL, "")


@dataclass(frozen=True)
class Placed:
    """One actor and the node planned for it."""

    role: str
    index: int
    node_id: str
    cpus: float
    gpus: float
    accelerator_type: str


@dataclass(frozen=True)
class Shortfall:
    """Actors of a request that found no node."""

    request: Request
    missing: int


@dataclass(frozen=True)
class Plan:
    """Where each actor goes, and what found no place."""

    placed: tuple[Placed, ...] = ()
    shortfalls: tuple[Shortfall, ...] = ()
    nodes: tuple[Node, ...] = ()
    requests: tuple[Request, ...] = field(default=())

    def require(self) -> Plan:
        """The plan itself; raises PlacementError with the whole text when something is missing."""
        if self.shortfalls:
            raise PlacementError(shortfall_text(self))
        return self


def make_plan(requests: Iterable[Request], nodes: Iterable[Node]) -> Plan:
    """Places the most constrained requests first: GPU types, then one-node groups, then GPUs, then CPUs.

    First fit over nodes, nodes reserved for the role first, so that equal inputs give equal plans.
    """
    asked, held = tuple(requests), tuple(nodes)
    free = {node.id: [node.cpus, node.gpus] for node in held}
    placed: list[Placed] = []
    shortfalls: list[Shortfall] = []
    order = sorted(asked, key=lambda r: (not r.accelerator_type, not r.one_node, -r.gpus, -r.cpus))
    for request in order:
        done = _place(request, held, free)
        placed += done
        if len(done) < request.count:
            shortfalls.append(Shortfall(request, request.count - len(done)))
    return Plan(tuple(placed), tuple(shortfalls), held, asked)


def _place(request: Request, nodes: Sequence[Node], free: dict[str, list[float]]) -> list[Placed]:
    fitting = [n for n in nodes if not request.accelerator_type or n.accelerator_type == request.accelerator_type]
    fitting = [n for n in fitting if n.role in ("", request.role)]
    fitting.sort(key=lambda n: n.role != request.role)
    # A request without GPUs leaves GPU nodes alone as long as another has room.
    if not request.gpus:
        fitting.sort(key=lambda n: (n.role != request.role, n.gpus > 0))
    placed: list[Placed] = []
    for node in fitting:
        cpus, gpus = free[node.id]
        room = _room(request, cpus, gpus)
        if request.one_node and room < request.count:
            continue
        take = min(room, request.count - len(placed))
        for _ in range(take):
            free[node.id][0] -= request.cpus
            free[node.id][1] -= request.gpus
            placed.append(
                Placed(request.role, len(placed), node.id, request.cpus, request.gpus, request.accelerator_type)
            )
        if len(placed) == request.count:
            break
    return placed


def _room(request: Request, cpus: float, gpus: float) -> int:
    limits = [request.count]
    if request.cpus > 0:
        limits.append(int((cpus + EPSILON) / request.cpus))
    if request.gpus > 0:
        limits.append(int((gpus + EPSILON) / request.gpus))
    return max(0, min(limits))


def label_selector(accelerator_type: str) -> dict[str, str] | None:
    """Ray's label selector for a GPU type; None where any node will do."""
    return {TYPE_LABEL: accelerator_type} if accelerator_type not in ("", "cpu") else None


def plan_text(plan: Plan) -> str:
    """The plan as lines: role, count, resources each, nodes."""
    lines = []
    for request in plan.requests:
        mine = [p for p in plan.placed if p.role == request.role and p.accelerator_type == request.accelerator_type]
        where = ", ".join(f"{node} x{count}" for node, count in sorted(Counter(p.node_id for p in mine).items()))
        lines.append(f"{request.role:<10} {request.count} x {_each(request)}  ->  {where or 'no node'}")
    return "\n".join(lines)


def shortfall_text(plan: Plan) -> str:
    """What was asked, what the cluster has, what to change, in one text."""
    asked = "; ".join(f"{r.count} {r.role} of {_each(r)}" for r in plan.requests)
    has = "; ".join(
        f"{n.id}: {n.cpus:g} CPU, {n.gpus:g} GPU{f' {n.accelerator_type}' if n.accelerator_type else ''}"
        for n in plan.nodes
    )
    missing = []
    for shortfall in plan.shortfalls:
        request = shortfall.request
        more = f"{shortfall.missing} of {request.count} {request.role} ({_each(request)}) found no node"
        where = " together on one node" if request.one_node else ""
        change = (
            f"lower {request.setting} to {request.count - shortfall.missing}" if request.setting else "ask for fewer"
        )
        missing.append(f"{more}{where}: {change}, or add nodes with {_each(request)}")
    return f"The cluster is too small. Asked: {asked}. It has: {has or 'no node'}. Missing: {'; '.join(missing)}."


def _each(request: Request) -> str:
    parts = [f"{request.cpus:g} CPU"]
    if request.gpus or request.accelerator_type:
        parts.append(f"{request.gpus:g} GPU {request.accelerator_type}".strip())
    return ", ".join(parts)
