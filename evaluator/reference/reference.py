"""The reference of one task: loaded from its source, admitted once, fed with drawn inputs and parameters.

Invariants: inputs are functions of their draw, parameters of their seed and style alone; the task's code runs only in
the reference server; inputs given to the reference are the server's own, so nothing a candidate writes reaches it.
"""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch

from evaluator.judgement.facts import DrawKind
from evaluator.reference.admission import Admission, admit
from evaluator.reference.adversaries import poisoned
from evaluator.reference.budget import ErrorBudget
from evaluator.reference.comparison import Leaves
from evaluator.reference.domain import draw_inputs
from evaluator.reference.fresh import timed_inputs
from evaluator.reference.parameters import Style, usable_state
from evaluator.reference.subject import Subject, map_tensors, seeded
from evaluator.timing.clock import MOST_LEAD_NS
from evaluator.worker import burst, native
from evaluator.worker.backend import Backend
from evaluator.worker.tree import flatten
from tasks.records.task import Precision

TASK_FILE = "task.py"
"""What tracebacks call the task's source."""
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHORT_CALL_NS = 5e6
"""A call below it is timed in more bursts, since they cost nothing beside the admission."""


class IllFormedTask(ValueError):
    """The task's source does not follow the convention."""


class Reference:
    """One task, ready to draw inputs and to run its reference model."""

    def __init__(
        self, namespace: dict[str, Any], precision: Precision, mode: str, seed: int, backend: Backend
    ) -> None:  # fmt: skip
        self._namespace = namespace
        self._backend = backend
        self.precision = precision
        self.dtype = DTYPES[precision]
        self.train = mode != "eval"
        self.device = backend.device
        self.admission: Admission
        self.call_ns = math.inf
        self.mutated: list[str] = []
        """Entries of the state that a call changes, such as the running statistics of a normalisation."""
        self.gradients = False
        """Whether inputs as the task makes them require gradients."""
        self.input_bytes: list[int] = []
        self.output_bytes: list[int] = []
        with seeded(seed, self.device):
            self.arguments = [self._cast(value) for value in namespace["get_init_inputs"]()]
        with seeded(seed, self.device):
            model = namespace["Model"](*self.arguments)
        if not isinstance(model, torch.nn.Module):
            raise IllFormedTask("Model(...) is not a torch.nn.Module")
        self.model = model.to(self.device, self.dtype).train(self.train)
        self.subject = Subject(self.model, self._make_inputs, self.device)
        self._constructed = {name: value.clone() for name, value in self.model.state_dict().items()}

    @classmethod
    def load(cls, source: str, precision: Precision, mode: str, seed: int, backend: Backend) -> Reference:
        """Runs the task's source. Raises IllFormedTask when a part of the convention is missing."""
        module = types.ModuleType("task")
        exec(compile(source, TASK_FILE, "exec"), module.__dict__)
        for name in ("Model", "get_inputs", "get_init_inputs"):
            if not callable(module.__dict__.get(name)):
                raise IllFormedTask(f"the task defines no {name}")
        return cls(module.__dict__, precision, mode, seed, backend)

    def _make_inputs(self) -> Sequence[Any]:
        inputs = self._namespace["get_inputs"]()
        if not isinstance(inputs, list | tuple):
            raise IllFormedTask("get_inputs() does not return a list")
        tensors = flatten(list(inputs), native.is_tensor).tensors
        self.gradients = self.gradients or any(tensor.requires_grad for tensor in tensors)
        return [map_tensors(value, self._cast) for value in inputs]

    def _cast(self, value: Any) -> Any:
        """Tensors on the device, detached and dense, floating ones in the task's dtype; all else as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        tensor = value.detach().to(self.device)
        tensor = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        return tensor if native.dense(tuple(tensor.shape), tensor.stride()) else tensor.contiguous()

    def admit(self, seed: int, known: str | None) -> None:
        """Sizes and call time; domain and error budgets, from an earlier admission's JSON where it is given."""
        drawn = [self.subject.draw(seed + index) for index in range(3)]
        if not known:
            self._refuse_unless_comparable(self.subject.run(drawn[0]))
        self.input_bytes = [native.nbytes_of(tensor) for tensor in flatten(drawn[0], native.is_tensor).tensors]
        self.admission = (
            Admission.model_validate_json(known)
            if known
            else admit(self.subject, secret=seed, precision=self.precision)
        )
        if self.admission.randomness == "dropout":
            self.quieten()
        results = self._timed(drawn)
        if self.call_ns < SHORT_CALL_NS:  # one moment's delay would count as its length
            for _ in range(3):
                self._timed(drawn)
        self.mutated = [n for n, value in self.model.state_dict().items() if not _equal(value, self._constructed[n])]
        self._copy_state(self._constructed)
        self.output_bytes = [t.numel() * t.element_size() for t in flatten(results[0], native.is_tensor).tensors]

    def _timed(self, drawn: list[list[Any]]) -> list[Any]:
        """Results on the draws; keeps the time of the quickest call but the first."""
        results, stamps, _ = self._backend.run_burst(self.model, drawn, lead_ns=MOST_LEAD_NS)
        self.call_ns = min(self.call_ns, *(after - before for before, after in pairwise(stamps[1:])))
        return results

    def _refuse_unless_comparable(self, outputs: Leaves) -> None:
        if not outputs:
            raise IllFormedTask("forward returns no tensor, so there is nothing to compare; return at least one")
        if len(outputs) > burst.MAX_LEAVES:
            raise IllFormedTask(f"forward returns {len(outputs)} tensors; at most {burst.MAX_LEAVES} are compared")
        for path, tensor in outputs:
            if tensor.is_complex() or native.spec_of(tensor).dtype not in native.DTYPES:
                kind = str(tensor.dtype).removeprefix("torch.")
                raise IllFormedTask(f"output {path} is of {kind}, which is not compared; return real numbers")

    def quieten(self) -> None:
        """Dropout off, where it is what makes the reference random."""
        for module in self.model.modules():
            if isinstance(module, torch.nn.modules.dropout._DropoutNd):
                module.eval()

    def budget(self, kind: DrawKind, *, constructed: bool) -> ErrorBudget:
        """The error budget of one kind of draw, for parameters as constructed or drawn."""
        return self.admission.budget(kind, constructed=constructed)

    def inputs(self, draw: dict[str, Any]) -> list[Any]:
        """The inputs of one call."""
        seed, kind = int(draw["seed"]), cast("DrawKind", draw["kind"])
        if draw["timed"]:
            return timed_inputs(self.subject, self.admission.domain, seed)
        inputs = draw_inputs(self.subject, self.admission.domain, kind, seed)
        if draw["sparse"] is not None:
            self._sparse(inputs, int(draw["sparse"]))
        return poisoned(inputs) if draw["poison"] else inputs

    def _sparse(self, inputs: list[Any], seed: int) -> None:
        """Replaces a few elements of every free floating input by those of another draw, in place."""
        others = flatten(self.subject.draw(seed), native.is_tensor).tensors
        tensors = flatten(inputs, native.is_tensor).tensors
        generator = torch.Generator(self.device).manual_seed(seed)
        for trait, tensor, other in zip(self.admission.domain.traits, tensors, others, strict=True):
            if not trait.perturbable or trait.fixed_structure or not tensor.is_contiguous() or not tensor.numel():
                continue
            count = max(1, tensor.numel() // 256)
            places = torch.randint(tensor.numel(), (count,), generator=generator, device=self.device)
            tensor.view(-1)[places] = other.reshape(-1)[places]

    def answer(self, draw: dict[str, Any]) -> Leaves:
        """The reference's output on a draw, under the parameters of now."""
        return self.subject.run(self.inputs(draw))

    def set_parameters(self, seed: int | None, style: Style = "near") -> None:
        """Parameters and buffers as constructed, or random from a seed at a scale where the reference stays finite."""
        self._copy_state(self._constructed)  # what is drawn depends on the spread of what is there
        drawn = None if seed is None else usable_state(self.subject, seed, style)
        if drawn is not None:
            self._copy_state(drawn)

    def _copy_state(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(state[name])

    def flops(self) -> int:
        """Floating-point operations of one call that PyTorch can count: products, convolutions, attention."""
        from torch.utils.flop_counter import FlopCounterMode  # brings Triton, which no forked worker should have

        with FlopCounterMode(display=False) as counter:
            self.subject.run(self.subject.draw(0))
        return int(counter.get_total_flops())

    def health(self) -> bool:
        """A known product on the device: whole numbers, so that every bit is known."""
        side = 256
        ones = torch.ones(side, side, device=self.device)
        return bool(((ones @ ones) == side).all())

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        return dict(self.model.state_dict())


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))
