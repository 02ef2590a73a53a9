"""What passes between a worker and the compile pool: plain text with fixed fields, checked before use.

Invariants: nothing in a request names a file outside the job's own folder; a result names no path of the judge's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

FailureKind = Literal["compile_error", "timeout", "resource_abuse", "no_space", "sandbox_unavailable", "evaluator_lost"]
"""Reasons of the record: the first three are the candidate's doing, the others leave it unscored."""

MAX_SOURCE_BYTES = 1 << 20
TEXT_LIMIT = 4000
"""Characters of compiler text that are kept."""


class BadRequest(ValueError):
    """A message that is no request of the schema."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourceFile(_Message):
    """One file of a request. A header's name may lie in folders (`detail/math.h`)."""

    name: str = Field(max_length=200)
    text: str = Field(max_length=MAX_SOURCE_BYTES)

    @field_validator("name")
    @classmethod
    def _relative(cls, name: str) -> str:
        parts = name.split("/")
        if not all(part and part not in (".", "..") and part.isprintable() and "\\" not in part for part in parts):
            raise ValueError("a file's name must be relative and without . or ..")
        return name


class CompileRequest(_Message):
    """Sources and flags of one library."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")
    """The library's and, for an extension, the Python module's name."""
    sources: tuple[SourceFile, ...] = Field(min_length=1, max_length=64)
    """`.c`, `.cc`, `.cpp`, `.cxx` for the system's compiler, `.cu` for nvcc."""
    headers: tuple[SourceFile, ...] = Field(default=(), max_length=256)
    """Found by `#include` next to the sources."""
    torch: bool = True
    """With torch's headers and libraries; else plain C, C++ or CUDA."""
    implicit_headers: bool = True
    """Whether `torch/extension.h` (C++) or `torch/types.h` (CUDA) comes before the sources, as in `load_inline`."""
    cuda: bool = False
    """With CUDA's headers and libraries; set by itself when a source is `.cu`."""
    cflags: tuple[str, ...] = Field(default=(), max_length=100)
    cuda_cflags: tuple[str, ...] = Field(default=(), max_length=100)
    ldflags: tuple[str, ...] = Field(default=(), max_length=100)
    include_paths: tuple[str, ...] = Field(default=(), max_length=32)
    """Absolute folders of the system."""

    @property
    def uses_cuda(self) -> bool:
        """Whether nvcc or CUDA's libraries are needed."""
        return self.cuda or any(source.name.endswith(".cu") for source in self.sources)

    @classmethod
    def from_wire(cls, message: dict[str, Any]) -> Self:
        """Reads a worker's message (`op` apart); raises BadRequest for anything off the schema."""
        try:
            request = cls.model_validate({key: value for key, value in message.items() if key != "op"})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise BadRequest(f"{place}: {first['msg']}") from error
        names = [source.name for source in (*request.sources, *request.headers)]
        if len(set(names)) != len(names):
            raise BadRequest("two files of one name")
        return request

    def to_wire(self) -> dict[str, Any]:
        """The message that `from_wire` reads."""
        return {"op": "compile", **self.model_dump(mode="json")}


class Diagnostic(_Message):
    """One error of a compiler."""

    file: str
    line: int
    message: str


class CompileResult(_Message):
    """What became of a request. `library` stays in the judge; a worker gets a sealed copy of it."""

    name: str
    kind: FailureKind | None = None
    """None when the library is there."""
    message: str = ""
    """One sentence about a failure."""
    errors: tuple[Diagnostic, ...] = ()
    """The compiler's first errors, with lines of the request's sources."""
    text: str = ""
    """The compiler's own words, cut to a size."""
    library: Path | None = None
    key: str = ""
    cached: bool = False
    seconds: float = 0.0
    """Of the build alone."""
    waited_s: float = 0.0
    isolation: tuple[str, ...] = ()
    """Layers that were on in the job."""

    @property
    def ok(self) -> bool:
        """Whether there is a library."""
        return self.kind is None

    def to_answer(self) -> dict[str, Any]:
        """The message to the worker; when `ok`, the library's descriptor travels beside it."""
        return {"op": "compiled", "ok": self.ok, "name": self.name, "text": self.text or self.message}

    def to_detail(self) -> dict[str, Any]:
        """What an evaluation keeps of it, in plain values."""
        return {
            "compiler_errors": [error.model_dump() for error in self.errors], "compiler_text": self.text,
            "library": self.name,
        }  # fmt: skip
