"""Whole evaluations of small candidates: outcomes, reasons and steps, through all processes."""

from __future__ import annotations

import textwrap

import pytest

from evaluator import Evaluator, EvaluatorConfig, evaluate
from evaluator.config import SandboxConfig
from tasks.errors import UsageError
from tasks.records import Candidate, Evaluation, Task

HEAD = """
import torch
from torch import nn
"""
BODY = """
class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
        {init}
    def forward(self, x):
        {forward}
"""


def candidate(forward: str, *, top: str = "", init: str = "pass") -> Candidate:
    body = BODY.format(init=init, forward=textwrap.indent(forward, " " * 8).strip())
    return Candidate(source=HEAD + textwrap.dedent(top) + body)


RIGHT = candidate("return self.fc(x).clamp_min_(0)")


def judged(evaluator: Evaluator, task: Task, proposal: Candidate) -> Evaluation:
    result = evaluator.evaluate(task, proposal)
    assert Evaluation.from_json(result.to_json()) == result
    return result


def test_a_right_candidate_is_accepted_with_its_measurement(evaluator: Evaluator, task: Task) -> None:
    result = judged(evaluator, task, RIGHT)
    assert (result.outcome, result.reason) == ("accepted", None), result.message
    assert result.measurement is not None
    assert result.measurement.ci_low <= result.measurement.speedup <= result.measurement.ci_high
    assert result.measurement.pairs >= 2
    assert result.measurement.reference_ms > 0
    assert {"screen", "admit", "load", "check", "probe", "time"} <= set(result.seconds_by_step)
    assert {"landlock", "seccomp"} <= set(result.isolation)
    assert len(result.detail["seed"]) == 32
    assert result.facts["draws"]


def test_a_task_of_its_own_file_needs_no_session(task: Task) -> None:
    wrong = candidate("return torch.zeros_like(x)")
    assert evaluate(task, wrong).reason == "incorrect"


@pytest.mark.parametrize(
    ("proposal", "reason", "step"),
    [
        (Candidate(source="class ModelNew(:"), "contract", "screen"),
        (Candidate(source="x = 1"), "contract", "screen"),
        (Candidate(source="ModelNew = None"), "contract", "load"),
        (Candidate(source="class ModelNew:\n    def __init__(self, width): pass"), "contract", "load"),
        (Candidate(source="import no_such_library\nclass ModelNew: pass"), "crash", "load"),
        (candidate("return self.fc(x)"), "incorrect", "check"),
        (candidate("raise RuntimeError('no')"), "crash", "warm"),
        (candidate("raise SystemExit(0)"), "crash", "warm"),
        (candidate("import os; os._exit(0)"), "crash", "warm"),
        (candidate("import os; os.abort()"), "crash", "warm"),
        (candidate("import ctypes; ctypes.string_at(0)"), "crash", "warm"),
        (candidate("while True: pass", init="self.n = 0"), "timeout", "warm"),
        (candidate("return x.relu_()"), "input_mutation", "check"),
        (candidate("return torch.relu(self.fc(x)).double()"), "incorrect", "check"),
        (candidate("return torch.relu(self.fc(x)), 1"), "incorrect", "check"),
        (candidate("self.kept = getattr(self, 'kept', []) + [torch.ones(1 << 26)]\nreturn torch.relu(self.fc(x))"),
         "resource_abuse", "check"),
        (candidate("return torch.relu(self.fc(x))", top="torch.relu = lambda x: x"), "tampering", "warm"),
    ],
)  # fmt: skip
def test_a_wrong_candidate_is_rejected_with_reason_and_step(
    evaluator: Evaluator, task: Task, proposal: Candidate, reason: str, step: str
) -> None:
    result = judged(evaluator, task, proposal)
    assert (result.outcome, result.reason) == ("rejected", reason), result.message
    assert result.step == step, result.message
    assert result.message.endswith(".")


def test_arms_have_as_many_threads_as_the_setting_says(task: Task, quick: EvaluatorConfig) -> None:
    """Also where a library starts them with its first use, before anything is forked."""
    both = candidate("assert torch.get_num_threads() == 2\nreturn torch.relu(self.fc(x))")
    with Evaluator(config=quick.model_copy(update={"threads": 2})) as evaluator:
        found = judged(evaluator, task, both)
    assert found.outcome == "accepted", found.message


LATER = "self.calls = getattr(self, 'calls', 0) + 1\nwhile self.calls > {count}: pass\nreturn torch.relu(self.fc(x))"


@pytest.mark.parametrize(
    ("proposal", "step", "words"),
    [
        (candidate("return x", top="while True: pass"), "load", "the candidate's source to be imported"),
        (candidate("return x", init="while True: pass"), "load", "the candidate's model to be constructed"),
        (candidate(LATER.format(count=0)), "warm", "the candidate's first call"),
        (candidate(LATER.format(count=1)), "warm", "the candidate's second call"),
        (candidate(LATER.format(count=5)), "check", "the check on fresh inputs"),
    ],
)
def test_a_hang_says_what_hung(evaluator: Evaluator, task: Task, proposal: Candidate, step: str, words: str) -> None:
    result = judged(evaluator, task, proposal)
    assert (result.outcome, result.reason, result.step) == ("rejected", "timeout", step), result.message
    assert f"({words})" in result.message


def test_the_memory_limit_ends_a_worker(evaluator: Evaluator, task: Task) -> None:
    result = judged(evaluator, task, candidate("x = torch.ones(1 << 30)\nimport time; time.sleep(1)\nreturn x"))
    assert (result.outcome, result.reason) == ("rejected", "resource_abuse"), result.message


def test_an_evaluator_goes_on_after_every_kind_of_crash(evaluator: Evaluator, task: Task) -> None:
    for forward in ("import os; os.abort()", "while True: pass", "return 1"):
        assert judged(evaluator, task, candidate(forward)).outcome == "rejected"
    assert judged(evaluator, task, RIGHT).outcome == "accepted"


def test_nothing_is_kept_from_one_candidate_to_the_next(evaluator: Evaluator, task: Task) -> None:
    leaves = candidate("return torch.relu(self.fc(x))", top="open('/tmp/left', 'w').write('x'); torch.left = 1")
    finds = candidate(
        "return torch.relu(self.fc(x))",
        top="import os\nassert not os.path.exists('/tmp/left') and not hasattr(torch, 'left')",
    )
    assert judged(evaluator, task, leaves).outcome == "accepted"
    assert judged(evaluator, task, finds).outcome == "accepted"


def test_renaming_and_reformatting_change_no_verdict(evaluator: Evaluator, task: Task) -> None:
    wrong = candidate("speedup = self.fc(x)\nreturn speedup")
    other = candidate("q = (self\n    .fc(x))  # right\nreturn q")
    assert judged(evaluator, task, wrong).reason == judged(evaluator, task, other).reason == "incorrect"


def test_the_reference_stays_warm_and_the_seed_draws_again(evaluator: Evaluator, task: Task) -> None:
    first = judged(evaluator, task, candidate("return self.fc(x)"))
    again = evaluator.evaluate(task, candidate("return self.fc(x)"), seed=bytes.fromhex(first.detail["seed"]))
    assert again.seconds_by_step["admit"] < 0.1
    assert (again.detail["index"], again.detail["seed"]) == (first.detail["index"], first.detail["seed"])


def test_an_ill_formed_task_is_unscored_with_one_sentence(evaluator: Evaluator) -> None:
    broken = Task(id="file:broken", source="class Model: pass")
    result = judged(evaluator, broken, RIGHT)
    assert (result.outcome, result.reason) == ("unscored", "reference_failed")
    assert "get_inputs" in result.message


PLAIN = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
    def forward(self, x):
        return {forward}
def get_inputs():
    {inputs}
def get_init_inputs():
    return []
"""


@pytest.mark.parametrize(
    ("forward", "inputs", "says"),
    [
        ("x", "raise ValueError('boom')", "ValueError: boom (line 10)"),
        ("x", "return None", "get_inputs() does not return a list"),
        ("x / 0 // 0 + y", "return [torch.ones(3)]", "(line 8)"),
        ("None", "return [torch.ones(3)]", "no tensor"),
        ("3", "return [torch.ones(3)]", "no tensor"),
        ("x.to(torch.complex64) * 2", "return [torch.randn(3)]", "output 0 is of complex64"),
        ("tuple(x + i for i in range(100))", "return [torch.ones(3)]", "100 tensors"),
        ("x", "raise SystemExit(3)", "SystemExit: 3 (line 10)"),
        ("object()", "return [torch.ones(3)]", "no tensor"),
        ("(x + 1, object())", "return [torch.ones(3)]", "a value of type object"),
    ],
)
def test_a_task_that_cannot_be_used_is_one_sentence(
    evaluator: Evaluator, capfd: pytest.CaptureFixture[str], forward: str, inputs: str, says: str
) -> None:
    """What its own code raises, and outputs that cannot be compared: else a candidate like it would seem wrong."""
    broken = Task(id="file:broken", source=PLAIN.format(forward=forward, inputs=inputs))
    result = judged(evaluator, broken, RIGHT)
    assert (result.outcome, result.reason) == ("unscored", "reference_failed")
    assert result.message.startswith("the task cannot be used: ")
    assert says in result.message
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("forward", ["x", "(x + 1, x)", "{'a': [x.t(), x[1:]]}"])
def test_results_that_are_inputs_are_allowed_where_the_reference_hands_them_out(
    evaluator: Evaluator, forward: str
) -> None:
    passing = Task(id="file:passing", source=PLAIN.format(forward=forward, inputs="return [torch.randn(64, 64)]"))
    twin = passing.source.partition("def get_inputs")[0].replace("class Model(", "class ModelNew(")
    result = judged(evaluator, passing, Candidate(source=twin))
    assert result.outcome == "accepted", result.message


@pytest.mark.parametrize("forward", ["tuple(x + i for i in range(100))", "[1] * 5000", "{'a' * 500: x + 1}"])
def test_results_of_an_unwieldy_form_are_wrong_and_no_forgery(evaluator: Evaluator, task: Task, forward: str) -> None:
    assert judged(evaluator, task, candidate(f"return {forward}")).reason == "incorrect"


KEEPS = """
import torch
from torch import nn
class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = torch.ones(32, 32).tril()
        self.tables = [torch.arange(64.0)]
    def forward(self, x):
        return {result}
"""
KEPT_RESULTS = ("torch.relu(x), self.mask", "torch.relu(x), self.tables[0][8:]")
FRESH_RESULTS = ("torch.relu(x), torch.ones(32, 32).tril()", "torch.relu(x), torch.arange(8.0, 64.0)")


@pytest.mark.parametrize(("reference", "own"), [*zip(KEPT_RESULTS, KEPT_RESULTS, strict=True),
                                                *zip(KEPT_RESULTS, FRESH_RESULTS, strict=True)])  # fmt: skip
def test_what_the_reference_hands_out_and_keeps_stays_as_it_is(evaluator: Evaluator, reference: str, own: str) -> None:
    """Memory that is neither parameter nor buffer: a candidate may keep it too, or make it anew."""
    inputs = "\ndef get_inputs():\n    return [torch.randn(64, 64)]\ndef get_init_inputs():\n    return []\n"
    keeping = Task(id="file:keeps", source=KEEPS.format(name="Model", result=reference) + inputs)
    result = judged(evaluator, keeping, Candidate(source=KEEPS.format(name="ModelNew", result=own)))
    assert result.outcome == "accepted", result.message


SQUARED = """
import sys, torch
from torch import nn
class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(320, 320) / 18)
        self.ready = []
    def formula(self, x):
        return torch.relu(x @ (self.weight @ self.weight))
    def forward(self, x):
        {forward}
"""
ALL_AT_ONCE = """frame = sys._getframe()
        while frame is not None and not {"calls", "stamps", "index"} <= set(frame.f_locals):
            frame = frame.f_back
        if frame is None:
            return self.formula(x)
        if frame.f_locals["index"] == 0:
            self.ready = list(self.formula(torch.cat([call[0] for call in frame.f_locals["calls"]])).split(len(x)))
        return self.ready.pop(0)"""


def test_a_turn_done_in_its_first_call_is_not_paid(evaluator: Evaluator) -> None:
    """It finds the inputs of all calls in the frame that calls it, and works on them together."""
    inputs = "\ndef get_inputs():\n    return [torch.randn(4, 320)]\ndef get_init_inputs():\n    return []\n"
    squared = Task(id="file:squared", source=SQUARED.format(name="Model", forward="return self.formula(x)") + inputs)
    result = judged(evaluator, squared, Candidate(source=SQUARED.format(name="ModelNew", forward=ALL_AT_ONCE)))
    assert result.outcome == "accepted", result.message
    assert result.facts["timers"]["native_log"] > 0.5
    assert result.measurement is not None
    assert result.measurement.speedup < 1.25
    assert "span_limited" in result.labels


def test_a_task_too_large_for_the_machine_is_unscored(
    evaluator: Evaluator, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluator.loading.free_bytes", lambda: 1 << 10)
    result = judged(evaluator, task, RIGHT)
    assert (result.outcome, result.reason) == ("unscored", "too_large")
    assert "MiB" in result.message


def test_an_unknown_device_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no device"):
        Evaluator("tpu")


def test_without_any_layer_candidates_are_refused_unless_told_otherwise(task: Task) -> None:
    bare = EvaluatorConfig(sandbox=SandboxConfig(layers=()))
    assert evaluate(task, RIGHT, config=bare).reason == "sandbox_unavailable"
    trusting = EvaluatorConfig(sandbox=SandboxConfig(layers=(), allow_unsandboxed=True))
    result = evaluate(task, candidate("return self.fc(x)"), config=trusting)
    assert (result.reason, result.isolation) == ("incorrect", ())


NORM = Task(id="file:norm", source="""
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm = nn.BatchNorm1d(features)
    def forward(self, x):
        return self.norm(x)
def get_inputs():
    return [torch.randn(64, 32)]
def get_init_inputs():
    return [32]
""")  # fmt: skip


@pytest.mark.parametrize(("body", "reason"), [
    ("return self.norm(x)", None),
    ("""m, v = x.mean(0), x.var(0, unbiased=False)
        return (x - m) * torch.rsqrt(v + self.norm.eps) * self.norm.weight + self.norm.bias""", "incorrect"),
])  # fmt: skip
def test_buffers_that_the_reference_updates_are_compared(evaluator: Evaluator, body: str, reason: str | None) -> None:
    proposal = Candidate(source=NORM.source.replace("Model", "ModelNew").replace("return self.norm(x)", body))
    result = judged(evaluator, NORM, proposal)
    assert result.reason == reason, result.message
    if reason:
        assert "running" in result.message
