"""Candidates that build something, through the whole evaluator on CPU."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluator.compile import CompileConfig, discover
from evaluator.config import EvaluatorConfig, TimingConfig
from evaluator.session import Evaluator
from tasks.records import Candidate, Evaluation, Task

pytestmark = pytest.mark.skipif(not discover().cxx, reason="no C++ compiler on this machine")

TASK = Task(id="file:scale", source=textwrap.dedent("""
    import torch
    from torch import nn
    class Model(nn.Module):
        def forward(self, x):
            return torch.relu(x) * 2 + x
    def get_inputs():
        return [torch.randn(512, 1024)]
    def get_init_inputs():
        return []
"""))  # fmt: skip

DIRECT = """
import ctypes, subprocess, torch
from torch import nn
open("k.c", "w").write('''SOURCE''')
subprocess.run(["gcc", "-O3", "-shared", "-fPIC", "k.c", "-o", "k.so"], check=True)
go = ctypes.CDLL("./k.so").go
class ModelNew(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        go(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_long(x.numel()))
        return y
"""
KERNEL = "void go(const float* x, float* y, long n) { for (long i = 0; i < n; ++i) y[i] = x[i] > 0 ? 3 * x[i] : x[i]; }"

INLINE = """
import torch
from torch import nn
from torch.utils.cpp_extension import load_inline
SOURCE = '''
#include <Python.h>
static PyObject* go(PyObject*, PyObject* args) {
  unsigned long long a, b; long n;
  if (!PyArg_ParseTuple(args, "KKl", &a, &b, &n)) return nullptr;
  const float* x = (const float*)a; float* y = (float*)b;
  for (long i = 0; i < n; ++i) y[i] = x[i] > 0 ? 3 * x[i] : x[i];
  Py_RETURN_NONE;
}
static PyMethodDef methods[] = {{"go", go, METH_VARARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "m", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_scale() { return PyModule_Create(&module); }
'''
class ModelNew(nn.Module):
    def forward(self, x):
        if not hasattr(self, "kernel"):
            self.kernel = load_inline("scale", cpp_sources=SOURCE, no_implicit_headers=True, extra_cflags=["-O3"])
        y = torch.empty_like(x)
        self.kernel.go(x.data_ptr(), y.data_ptr(), x.numel())
        return y
"""


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    config = EvaluatorConfig(
        compile=CompileConfig(cache_dir=str(tmp_path_factory.mktemp("cache"))),
        timing=TimingConfig(half_width=0.3, cap_s=1.0, confirm_above=1e6),
    )
    with Evaluator("cpu", config) as made:
        yield made


def _evaluated(evaluator: Evaluator, source: str) -> Evaluation:
    return evaluator.evaluate(TASK, Candidate(source=source))


def test_a_first_call_of_load_inline_in_forward_is_built_and_accepted(evaluator: Evaluator) -> None:
    evaluation = _evaluated(evaluator, INLINE)
    assert evaluation.outcome == "accepted", evaluation.message
    assert evaluation.facts["compile"]["routes"] == ["load_inline"]
    assert evaluation.seconds_by_step["compile"] > 0
    assert "library" not in evaluation.labels


def test_a_compiler_that_the_candidate_runs_is_accepted(evaluator: Evaluator) -> None:
    evaluation = _evaluated(evaluator, DIRECT.replace("SOURCE", KERNEL))
    assert evaluation.outcome == "accepted", evaluation.message
    assert evaluation.facts["compile"]["routes"] == ["gcc"]
    assert "library" not in evaluation.labels


@pytest.mark.parametrize(
    "source",
    [
        INLINE.replace("Py_RETURN_NONE;", "return missing;"),
        DIRECT.replace("SOURCE", "\nint f(void) { return missing; }"),
        DIRECT.replace("SOURCE", "\nint f(void) { return missing; }").replace("check=True", "check=False"),
    ],
    ids=["load_inline", "gcc", "gcc_unchecked"],
)
def test_a_build_that_fails_is_a_compile_error_with_the_compilers_text(evaluator: Evaluator, source: str) -> None:
    evaluation = _evaluated(evaluator, source)
    assert (evaluation.outcome, evaluation.reason, evaluation.step) == ("rejected", "compile_error", "compile")
    assert "missing" in evaluation.message
    assert "missing" in evaluation.detail["compiler"]


def test_a_build_outside_of_its_schema_is_forged(evaluator: Evaluator) -> None:
    evaluation = _evaluated(evaluator, INLINE.replace('extra_cflags=["-O3"]', 'extra_cflags=["-O3"] * 200'))
    assert evaluation.reason == "forged_result"


def test_no_space_for_a_library_is_never_the_candidates_fault(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evaluator.compile.cache import CacheFull

    def full(*_: object) -> Path:
        raise CacheFull(28, "no space for a library")

    monkeypatch.setattr(evaluator.compile_pool().cache, "publish", full)
    evaluation = _evaluated(evaluator, INLINE.replace("-O3", "-O1"))
    assert (evaluation.outcome, evaluation.reason) == ("unscored", "no_space")


def test_the_same_seed_draws_the_same_inputs(evaluator: Evaluator) -> None:
    wrong = DIRECT.replace("SOURCE", KERNEL.replace("3 * x[i]", "2.9f * x[i]"))
    first = _evaluated(evaluator, wrong)
    assert first.reason == "incorrect"
    again = evaluator.evaluate(TASK, Candidate(source=wrong), seed=bytes.fromhex(first.detail["seed"]))
    assert (again.detail["index"], again.detail["got"]) == (first.detail["index"], first.detail["got"])
    other = _evaluated(evaluator, wrong)
    assert other.detail["got"] != first.detail["got"]


@pytest.mark.slow
def test_an_extension_with_torchs_headers_is_accepted(evaluator: Evaluator) -> None:
    source = """
    import torch
    from torch import nn
    from torch.utils.cpp_extension import load_inline
    SOURCE = '''
    torch::Tensor go(torch::Tensor x) {
        auto y = torch::empty_like(x);
        const float* a = x.data_ptr<float>();
        float* b = y.data_ptr<float>();
        for (int64_t i = 0; i < x.numel(); ++i) b[i] = a[i] > 0 ? 3 * a[i] : a[i];
        return y;
    }
    '''
    kernel = load_inline(name="scale", cpp_sources=SOURCE, functions=["go"], extra_cflags=["-O3"], verbose=False)
    class ModelNew(nn.Module):
        def forward(self, x):
            return kernel.go(x)
    """
    evaluation = _evaluated(evaluator, textwrap.dedent(source))
    assert evaluation.outcome == "accepted", evaluation.message


@pytest.mark.slow
def test_torch_compile_runs_in_the_sandbox_and_is_a_fallback_under_strict_rules(evaluator: Evaluator) -> None:
    source = """
    import torch
    from torch import nn
    class ModelNew(nn.Module):
        def __init__(self):
            super().__init__()
            self.run = torch.compile(self.formula)
        def formula(self, x):
            return torch.relu(x) * 2 + x
        def forward(self, x):
            return self.run(x)
    """
    evaluation = _evaluated(evaluator, textwrap.dedent(source))
    assert (evaluation.outcome, evaluation.reason) == ("rejected", "fallback"), evaluation.message
    assert evaluation.labels == ("compiler_wrapper",)
