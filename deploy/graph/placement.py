"""Who runs where: a plan of the roles against a cluster's nodes, and the text that says what is missing.

Invariants: pure, so that `--dry-run` prints what the run itself would do; an evaluator owns its GPU alone unless the
run takes turns on it; the learner's ranks share one node; what asks for a GPU type goes only to nodes of that label;
what is advised against a shortfall can be set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
    """The configuration key that counts them, one at least; named in the shortfall."""
    without: str = ""
    """How a run does without them, such as `set review.mode to off`; empty where it cannot."""
    share: str = ""
    """The configuration key of the CPUs of each."""


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
    fits: int = 0
    """How many would fit; of a request for one node, on one node."""


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
            fits = max((_room(request, *free[n.id]) for n in _fitting(request, held)), default=0)
            shortfalls.append(Shortfall(request, request.count - len(done), fits if request.one_node else len(done)))
    return Plan(tuple(placed), tuple(shortfalls), held, asked)


def _fitting(request: Request, nodes: Sequence[Node]) -> list[Node]:
    """Nodes of the type, and reserved for no other role."""
    typed = [n for n in nodes if not request.accelerator_type or n.accelerator_type == request.accelerator_type]
    return [n for n in typed if n.role in ("", request.role)]


def _place(request: Request, nodes: Sequence[Node], free: dict[str, list[float]]) -> list[Placed]:
    fitting = _fitting(request, nodes)
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
    """What was asked, what the cluster has, what can be changed, in one text."""
    asked = "; ".join(f"{r.count} {r.role} of {_each(r)}" for r in plan.requests)
    has = "; ".join(
        f"{n.id}: {n.cpus:g} CPU, {n.gpus:g} GPU{f' {n.accelerator_type}' if n.accelerator_type else ''}"
        for n in plan.nodes
    )
    missing = []
    for shortfall in plan.shortfalls:
        request = shortfall.request
        more = f"{shortfall.missing} of {request.count} {request.role} ({_each(request)}) found no node"
        where = " together on one node" if request.one_node and request.count > 1 else ""
        change = ", or ".join([*_advice(shortfall, plan), f"add nodes with {_each(request)}"])
        missing.append(f"{more}{where}: {change}")
    text = f"The cluster is too small. Asked: {asked}. It has: {has or 'no node'}. Missing: {'; '.join(missing)}."
    without_gpu = not any(node.gpus for node in plan.nodes) and any(short.request.gpus for short in plan.shortfalls)
    return f"{text} No node has a GPU; the preset demo trains without one." if without_gpu else text


def _advice(shortfall: Shortfall, plan: Plan) -> list[str]:
    """Settings that are possible, each of which leaves fewer actors without a node."""
    request, advice = shortfall.request, []
    now = sum(short.missing for short in plan.shortfalls)
    if request.setting and shortfall.fits >= 1 and _missing(plan, request, count=shortfall.fits) < now:
        advice.append(f"lower {request.setting} to {shortfall.fits}")
    elif request.without and _missing(plan, request, count=0) < now:
        advice.append(request.without)
    types = sorted({node.accelerator_type for node in plan.nodes} - {""})
    if request.accelerator_type and types and request.accelerator_type not in types:
        counts = range(request.count, 0, -1)
        left = {count: _missing(plan, request, count=count, accelerator_type=types[0]) for count in counts}
        best = min(left, key=lambda count: left[count])
        if left[best] < now:
            advice.append(f"set evaluator.pool to '{{{request.accelerator_type} = 0, {types[0]} = {best}}}'")
    cpus = sum(each.count * each.cpus for each in plan.requests)
    alone = _fitting(request, plan.nodes) if len(plan.nodes) == 1 else []
    if request.share and not shortfall.fits and alone and alone[0].cpus < cpus and alone[0].gpus >= request.gpus:
        advice.append(f"lower {request.share} and its like until all roles take at most {alone[0].cpus:g} CPU")
    return advice


def _missing(plan: Plan, request: Request, **changes: Any) -> int:
    """How many actors find no node when one request is changed."""
    requests = [replace(each, **changes) if each == request else each for each in plan.requests]
    return sum(short.missing for short in make_plan(requests, plan.nodes).shortfalls)


def _each(request: Request) -> str:
    parts = [f"{request.cpus:g} CPU"]
    if request.gpus or request.accelerator_type:
        parts.append(f"{request.gpus:g} GPU {request.accelerator_type}".strip())
    return ", ".join(parts)
