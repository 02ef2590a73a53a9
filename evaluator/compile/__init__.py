"""From sources to a shared library: toolchain, routes, cache, isolated jobs, and the worker's side of it.

Invariants: the judge decides what is run, a request only brings sources and flags; a compiler runs in the worker's own
isolation layers, under limits of time, memory and output, and dies with its owner; an artefact is named by everything
that went into it, published whole or not at all, and given away only as a sealed copy.

`CompileRequest` and `CompileResult` pass; `CompilePool` is the judge's side, with a `BuildDesk` for each worker; `shim`
is the worker's side; `discover` says what is installed and what a worker may execute.
"""

from evaluator.compile.config import CompileConfig
from evaluator.compile.desk import BuildDesk
from evaluator.compile.pool import CompilePool
from evaluator.compile.request import CompileRequest, CompileResult
from evaluator.compile.toolchain import Toolchain, discover

__all__ = ["BuildDesk", "CompileConfig", "CompilePool", "CompileRequest", "CompileResult", "Toolchain", "discover"]
