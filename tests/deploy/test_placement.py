"""The placement plan and its shortfall text."""

from __future__ import annotations

import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.config import load_config
from deploy.graph.cluster import requests_of
from deploy.graph.placement import TYPE_LABEL, Node, PlacementError, Request, make_plan, plan_text, shortfall_text


def gpu_node(name: str, gpus: int, kind: str, cpus: float = 16) -> Node:
    return Node(name, cpus, gpus, ((TYPE_LABEL, kind),))


def test_types_go_only_to_their_nodes() -> None:
    plan = make_plan(
        [
            Request("evaluator", 2, gpus=1, accelerator_type="H100"),
            Request("evaluator", 1, gpus=1, accelerator_type="A100"),
            Request("learner", 2, gpus=1, one_node=True),
        ],
        [gpu_node("a", 2, "A100"), gpu_node("h", 4, "H100")],
    )
    assert not plan.shortfalls
    nodes = {(p.role, p.accelerator_type, p.node_id) for p in plan.placed}
    assert ("evaluator", "H100", "h") in nodes
    assert ("evaluator", "A100", "a") in nodes
    assert ("evaluator", "H100", "a") not in nodes
    assert len({p.node_id for p in plan.placed if p.role == "learner"}) == 1


def test_shortfall_says_asked_has_and_change() -> None:
    """6 H100 evaluators on a node with 4: two are missing, and the text names the key to lower."""
    plan = make_plan(
        [Request("evaluator", 6, gpus=1, accelerator_type="H100", setting="evaluator.pool.H100")],
        [gpu_node("h", 4, "H100")],
    )
    with pytest.raises(PlacementError) as caught:
        plan.require()
    text = str(caught.value)
    assert "Asked: 6 evaluator of 1 CPU, 1 GPU H100" in text
    assert "h: 16 CPU, 4 GPU H100" in text
    assert "2 of 6 evaluator (1 CPU, 1 GPU H100) found no node: lower evaluator.pool.H100 to 4" in text


def test_a_learner_that_fits_no_single_node_is_short() -> None:
    plan = make_plan(
        [Request("learner", 8, gpus=1, one_node=True)], [gpu_node("x", 4, "H100"), gpu_node("y", 4, "H100")]
    )
    assert plan.shortfalls[0].missing == 8


def test_shares_of_one_gpu_fit() -> None:
    """0.5 + 0.3 + 0.2 = 1 GPU, which in floating point is not exactly 1."""
    plan = make_plan(
        [Request("generator", 1, gpus=0.5), Request("learner", 1, gpus=0.3), Request("evaluator", 1, gpus=0.2)],
        [Node("one", 8, 1)],
    )
    assert not plan.shortfalls
    assert "generator  1 x 1 CPU, 0.5 GPU  ->  one x1" in plan_text(plan)


def test_cpu_roles_leave_gpu_nodes_alone() -> None:
    plan = make_plan([Request("coordinator", 1)], [gpu_node("g", 8, "H100"), Node("c", 4)])
    assert plan.placed[0].node_id == "c"


@given(
    st.lists(
        st.builds(Request, st.sampled_from(["a", "b"]), st.integers(0, 5), st.integers(0, 3), st.integers(0, 2)),
        max_size=4,
    ),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=4),
)
def test_never_more_than_a_node_has(requests: list[Request], sizes: list[tuple[int, int]]) -> None:
    nodes = [Node(f"n{i}", cpus, gpus) for i, (cpus, gpus) in enumerate(sizes)]
    plan = make_plan(requests, nodes)
    for node in nodes:
        mine = [p for p in plan.placed if p.node_id == node.id]
        assert sum(p.cpus for p in mine) <= node.cpus
        assert sum(p.gpus for p in mine) <= node.gpus
    missing = sum(s.missing for s in plan.shortfalls)
    assert len(plan.placed) + missing == sum(r.count for r in requests)


CPU_NODE, SMALL_NODE = Node("c", 4), Node("s", 1)
ADVICE = re.compile(r"(?:lower|set) ([a-z_]+(?:\.\w+)+) to ('[^']+'|[\w.]+)")


NODES: dict[str, tuple[Node, ...]] = {
    "none": (), "CPUs": (CPU_NODE,), "one CPU": (SMALL_NODE,), "one H100": (gpu_node("h", 1, "H100"),),
    "two H200": (gpu_node("h", 2, "H200"),), "eight H100": (gpu_node("h", 8, "H100"),),
    "two A100 and CPUs": (gpu_node("a", 2, "A100"), CPU_NODE), "few CPUs": (gpu_node("h", 3, "H100", cpus=2),),
}  # fmt: skip


@pytest.mark.parametrize("where", NODES)
@pytest.mark.parametrize(
    "preset",
    ["one-gpu", "cluster", "demo", "cluster --cluster.learner_ranks 8", "cluster --evaluator.pool.A100 2",
     "one-gpu --review.mode advisory --review.engine openai --review.cpus 9 --review.openai.base_url http://x "
     "--review.openai.model m"],
)  # fmt: skip
def test_what_is_advised_can_be_set_and_helps(preset: str, where: str) -> None:
    nodes = NODES[where]
    name, *words = shlex.split(preset)
    plan = make_plan(requests_of(load_config(name, words)), nodes)
    text = shortfall_text(plan)
    for key, value in ADVICE.findall(text):
        changed = load_config(name, [*words, f"--{key}", value.strip("'")])
        fewer = make_plan(requests_of(changed), nodes)
        assert sum(s.missing for s in fewer.shortfalls) < sum(s.missing for s in plan.shortfalls), (key, value)
    assert "to 0" not in text.replace("pool.A100 to 0", "").replace("pool.H100 to 0", "")
    if plan.shortfalls and not any(node.gpus for node in nodes) and name != "demo":
        assert text.endswith("No node has a GPU; the preset demo trains without one.")


def test_a_type_that_the_cluster_has_not_is_answered_with_one_that_it_has() -> None:
    plan = make_plan(requests_of(load_config("one-gpu")), [gpu_node("h", 1, "H100")])
    assert "set evaluator.pool to '{H200 = 0, H100 = 1}'" in shortfall_text(plan)
    changed = load_config("one-gpu", ["--evaluator.pool", "{H200 = 0, H100 = 1}"])
    assert not make_plan(requests_of(changed), [gpu_node("h", 1, "H100")]).shortfalls
