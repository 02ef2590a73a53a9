"""What a candidate can be timed against instead of the task's reference as it is.

Invariants: an opponent is checked against the eager reference like any candidate; a baseline made of the reference may
use compilers and round as they do, whatever the rules ask of the candidate; its failure is never the candidate's.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.records import Candidate, Task
from tasks.records.evaluation import Baseline, UnscoredReason

_COMPILED = '''

class ModelNew(Model):
    """The reference under torch.compile with its default options."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.compile()
'''

_GRAPH = '''

class ModelNew(Model):
    """The reference captured once as a CUDA graph: inputs are copied in, the graph is replayed, results copied out."""

    def forward(self, *inputs):
        import torch
        from torch.utils import _pytree

        leaves, form = _pytree.tree_flatten(inputs)
        if "_replay" not in self.__dict__:
            kept = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            state = {name: value.clone() for name, value in self.state_dict().items()}
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    super().forward(*_pytree.tree_unflatten(kept, form))
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = super().forward(*_pytree.tree_unflatten(kept, form))
            with torch.no_grad():
                for name, value in self.state_dict().items():
                    value.copy_(state[name])
            self.__dict__["_replay"] = graph, kept, result
        graph, kept, result = self._replay
        for own, given in zip(kept, leaves):
            if isinstance(own, torch.Tensor):
                own.copy_(given)
        graph.replay()
        return _pytree.tree_map_only(torch.Tensor, torch.clone, result)
'''

_FORGIVEN = {"own_work": "labelled", "precision": "loose"}
_SUFFIXES: dict[Baseline, str] = {"compile": _COMPILED, "graph": _GRAPH}


@dataclass(frozen=True)
class Opponent:
    """Whom a candidate is timed against."""

    candidate: Candidate
    baseline: Baseline
    words: str
    """How a sentence calls it."""
    rule: dict[str, str]
    """Rules that differ for it."""
    failed: UnscoredReason
    """What an evaluation is unscored for when it is not right, or does not run."""
    advice: str
    """What to do then."""


def rival(candidate: Candidate) -> Opponent:
    """Another candidate."""
    return Opponent(candidate, "candidate", "the other candidate", {}, "other_rejected", "")


def baseline_of(task: Task, baseline: Baseline) -> Opponent:
    """The reference in another way of running it. Raises KeyError for one that needs no opponent."""
    words = {"compile": "the reference under torch.compile", "graph": "the reference as a CUDA graph"}[baseline]
    made = Candidate(source=task.source + _SUFFIXES[baseline], origin="reference")
    return Opponent(made, baseline, words, _FORGIVEN, "baseline_failed", " Use --baseline eager.")
