"""Small kernels for `gpu_smoke.py`: one element-wise task answered by every compile route, and three A/A tasks."""

from __future__ import annotations

from typing import Any

SCALE_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(columns) + 0.5)
        self.shift = nn.Parameter(torch.randn(columns))

    def forward(self, x):
        return torch.relu(x * self.scale + self.shift)


def get_inputs():
    return [torch.randn(4096, 2048)]


def get_init_inputs():
    return [2048]
"""

_HEAD = """
import torch
import torch.nn as nn
{imports}

class ModelNew(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(columns) + 0.5)
        self.shift = nn.Parameter(torch.randn(columns))
{init}
    def forward(self, x):
{forward}
"""

_CUDA = """
extern "C" __global__ void scale_relu(const float* x, const float* s, const float* b, float* y, long n, int c) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaxf(x[i] * s[i % c] + b[i % c], 0.f);
}
"""


def _candidate(forward: str, imports: str = "", init: str = "") -> str:
    lines = "".join(f"        {line}\n" for line in forward.split("\n"))
    return _HEAD.format(imports=imports, init=init, forward=lines)


TORCH = _candidate("return torch.addcmul(self.shift, x, self.scale).relu_()")
WRONG = _candidate("return torch.addcmul(self.shift, x, self.scale).abs_()")
TRITON = _candidate(
    "y = torch.empty_like(x)\n"
    "_scale_relu[(x.numel() // 4096,)](x, self.scale, self.shift, y, x.shape[1], BLOCK=4096, num_warps=8)\n"
    "return y",
    imports="""import triton
import triton.language as tl


@triton.jit
def _scale_relu(x, s, b, y, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = at % columns
    value = tl.load(x + at) * tl.load(s + column) + tl.load(b + column)
    tl.store(y + at, tl.maximum(value, 0.0))

""",
)
NVRTC = _candidate(
    "y = torch.empty_like(x)\nn = x.numel()\n"
    "_kernel(((n + 255) // 256, 1, 1), (256, 1, 1), (x, self.scale.detach(), self.shift.detach(), y, n, x.shape[1]))\n"
    "return y",
    imports=f'_SOURCE = r"""{_CUDA}"""\n_kernel = torch.cuda._compile_kernel(_SOURCE, "scale_relu")\n\n',
)
CUPY = _candidate(
    "y = torch.empty_like(x)\nn = x.numel()\n"
    "args = [cupy.asarray(t.detach()) for t in (x, self.scale, self.shift, y)]\n"
    "_kernel(((n + 255) // 256,), (256,), (*args, cupy.int64(n), cupy.int32(x.shape[1])))\n"
    "return y",
    imports=f'import cupy\n_kernel = cupy.RawKernel(r"""{_CUDA}""", "scale_relu")\n\n',
)
NVCC = _candidate(
    "y = torch.empty_like(x)\n"
    "p = [ctypes.c_void_p(t.data_ptr()) for t in (x, self.scale, self.shift, y)]\n"
    "_lib.launch(*p, ctypes.c_long(x.numel()), ctypes.c_int(x.shape[1]),\n"
    "            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))\n"
    "return y",
    imports=f'''import ctypes
import subprocess

with open("kernel.cu", "w") as file:
    file.write(r"""{_CUDA}
extern "C" void launch(void* x, void* s, void* b, void* y, long n, int c, void* stream) {{
    scale_relu<<<(n + 255) / 256, 256, 0, (cudaStream_t)stream>>>((float*)x, (float*)s, (float*)b, (float*)y, n, c);
}}
""")
subprocess.run(["nvcc", "-O3", "-shared", "-Xcompiler", "-fPIC", "-arch=native", "-o", "kernel.so", "kernel.cu"],
               check=True, capture_output=True)
_lib = ctypes.CDLL("./kernel.so")

''',
).replace('"-arch=native", ', '"-arch=sm_%d%d" % torch.cuda.get_device_capability(), ')
INLINE = _candidate(
    "return _ext.run(x, self.scale.detach(), self.shift.detach())",
    imports=f'''from torch.utils.cpp_extension import load_inline

_ext = load_inline(
    name="scale_relu_ext", cpp_sources="torch::Tensor run(torch::Tensor x, torch::Tensor s, torch::Tensor b);",
    cuda_sources=r"""
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
{_CUDA}
torch::Tensor run(torch::Tensor x, torch::Tensor s, torch::Tensor b) {{
    auto y = torch::empty_like(x);
    long n = x.numel();
    scale_relu<<<(n + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
        x.data_ptr<float>(), s.data_ptr<float>(), b.data_ptr<float>(), y.data_ptr<float>(), n, (int)x.size(1));
    return y;
}}
""", functions=["run"])

''',
)
FAULT = _candidate(
    "_kernel((1, 1, 1), (32, 1, 1), (x,))\nreturn torch.relu(x * self.scale + self.shift)",
    imports="_kernel = torch.cuda._compile_kernel("
    """'extern "C" __global__ void bad(float* x) { x[(1L << 46) + threadIdx.x] = 1.f; }', "bad")\n\n""",
)
GRAPH = _candidate(
    """if self._graph is None:
    self._in = x.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.relu(self._in * self.scale + self.shift)
    torch.cuda.current_stream().wait_stream(side)
    self._graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(self._graph):
        self._out = torch.relu(self._in * self.scale + self.shift)
self._in.copy_(x)
self._graph.replay()
return self._out.clone()""",
    init="        self._graph = None\n",
)
EARLY = _candidate(
    """side = self._side
with torch.cuda.stream(side):
    y = torch.relu(x * self.scale + self.shift)
torch.cuda.current_stream().wait_stream(side)
return y""",
    init="        self._side = torch.cuda.Stream(priority=-1)\n",
)
"""Does not wait for the caller's stream, so that its work may begin before its time does."""
HOARD = _candidate(
    "self._kept.append(torch.empty(64 << 20, dtype=torch.float32, device=x.device))\n"
    "return torch.relu(x * self.scale + self.shift)",
    init="        self._kept = []\n",
)


def _case(name: str, candidate: str, expect: str = "accept", **more: Any) -> dict[str, Any]:
    return {"name": name, "task": SCALE_TASK, "candidate": candidate, "expect": expect, **more}


OWN_CASES: list[dict[str, Any]] = [
    _case("own_torch", TORCH),
    _case("own_wrong", WRONG, "reject", reason="incorrect"),
    _case("own_triton", TRITON),
    _case("own_nvrtc", NVRTC),
    _case("own_cupy", CUPY),
    _case("own_nvcc_ctypes", NVCC),
    _case("own_graph_with_copies", GRAPH),
    _case("own_early_side_stream", EARLY, "reject", neutral_speedup_max=1.05),
    _case("own_fault", FAULT, "reject", reason="crash"),
    _case("own_hoards_device_memory", HOARD, "reject", reason="resource_abuse", also_ok=("state_leak",)),
    _case("own_load_inline", INLINE, builds=True),
]

_AA = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, {names}):
        return {formula}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""
AA_TASKS = {
    "relu_4mb": _AA.format(names="x", formula="torch.relu(x)", inputs="torch.randn(1024, 1024)"),
    "matmul_2048": _AA.format(
        names="a, b", formula="torch.matmul(a, b)", inputs="torch.randn(2048, 2048), torch.randn(2048, 2048)"
    ),
    "relu_512mb": _AA.format(names="x", formula="torch.relu(x)", inputs="torch.randn(8192, 16384)"),
}


def renamed(task: str) -> str:
    """The reference itself as a candidate."""
    return task.split("def get_inputs")[0].replace("class Model(", "class ModelNew(")
