"""The packed form of records: zlib over stable JSON, with a dictionary of what every record repeats.

Invariants: packing is deterministic, so equal records are equal bytes; the first byte names the codec, so that a later
one can be added without reading old data wrongly.
"""

from __future__ import annotations

import zlib
from typing import TypeVar

from pydantic import ValidationError

from exemplar_store.errors import DamagedValue, UnknownSchema
from tasks.records.base import Record

R = TypeVar("R", bound=Record)

PLAIN = 0
DEFLATE = 1
LEVEL = 1
"""Level 6 saves a tenth more at 1.3 times the time."""

_DICTIONARY = (
    b"__syncthreads();__shared__ float threadIdx.x blockIdx.x * blockDim.x gridDim.x __global__ void const float* "
    b'__restrict__ <<<blocks, threads>>> torch.utils.cpp_extension import load_inline extern "C" #pragma omp '
    b"import torch\\nimport torch.nn as nn\\nimport torch.nn.functional as F\\nimport triton\\nimport triton.language "
    b"as tl\\n\\nclass ModelNew(nn.Module):\\n    def __init__(self, ):\\n        super().__init__()\\n        self."
    b"\\n    def forward(self, x: torch.Tensor) -> torch.Tensor:\\n        return torch."
    b'{"candidate":{"detail":"","origin":"sample","source":"","candidate_hash":"","copy_of":"","edit_distance":null,'
    b'"defences":[],"detail":{},"device_type":"cpu","evaluation":{"facts":{},"isolation":[],"finish_reason":"stop",'
    b'"index":0,"logprobs":[-0.0,"policy_versions":[{"epoch":0,"step":0,"token_ids":[,"prompt_id":"","text":"'
    b'"labels":[],"measurement":{"candidate_ms":0.,"ci_high":1.,"ci_low":1.,"clocks":{},"confidence":0.98,'
    b'"confirmed":false,"definition":"latency","device_type":"cpu","pairs":20,"placements":1,"protocol":"sequential",'
    b'"reference_ms":0.,"speedup":1.,"stopped":"half_width","versions":{"evaluator":"1","package":"0.1.0",'
    b'"record_schema":1}},"message":"","origin":"","outcome":"accepted","precision":"fp32","reason":null,'
    b'"rules":"strict","seconds_by_step":{},"seed_commitment":"","source":"import torch\\nimport torch.nn as nn\\n","'
    b'"speedup":1.,"step":"time","task_hash":"","task_id":"procedural:kernelbench:","versions":{"evaluator":"1",'
    b'"package":"0.1.0","record_schema":1}}'
)


def pack(text: str) -> bytes:
    """The packed form of one JSON text."""
    deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zdict=_DICTIONARY)
    return bytes((DEFLATE,)) + deflate.compress(text.encode()) + deflate.flush()


def unpack(data: bytes) -> str:
    """The text that `pack` took; raises UnknownSchema for a codec of a later version, DamagedValue for what is torn."""
    codec = data[0] if data else -1
    if codec not in (PLAIN, DEFLATE):
        raise UnknownSchema(
            f"a stored value has codec {codec}, which this version cannot read: use the version that wrote it"
        )
    try:
        if codec == PLAIN:
            return data[1:].decode()
        inflate = zlib.decompressobj(-zlib.MAX_WBITS, zdict=_DICTIONARY)
        text = (inflate.decompress(data[1:]) + inflate.flush()).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise _damaged(str(error)) from error
    if not inflate.eof:
        raise _damaged("its end is missing")
    return text


def read(record: type[R], data: bytes) -> R:
    """The record that was packed; raises as `unpack`, and UnknownSchema where another version's record is found."""
    text = unpack(data)
    try:
        return record.from_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "the whole"
        raise UnknownSchema(
            f"a stored {record.__name__} cannot be read by this version ({where}: {problem['msg']}): use the version "
            "that wrote it"
        ) from error


def _damaged(how: str) -> DamagedValue:
    return DamagedValue(f"a stored value is damaged ({how}): `kontrast store verify` names all that are")
