"""What all records share: frozen, strict, versioned, with one stable JSON form and one content hash."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from tasks.version import EVALUATOR_VERSION, PACKAGE_VERSION, RECORD_SCHEMA_VERSION


class Versions(BaseModel):
    """Versions of the code that made a record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str = PACKAGE_VERSION
    evaluator: str = EVALUATOR_VERSION
    record_schema: int = RECORD_SCHEMA_VERSION


class Record(BaseModel):
    """Base of every record that crosses a process or is stored.

    The JSON form is stable: sorted keys, no white space, so that equal records are equal bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: Versions = Versions()

    def to_json(self) -> str:
        """The record as one line of JSON with sorted keys."""
        return stable_json(self.model_dump(mode="json"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads what `to_json` wrote; raises pydantic.ValidationError on anything else."""
        return cls.model_validate_json(text)


def stable_json(value: Any) -> str:
    """JSON with sorted keys and no white space; NaN and infinities are refused (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(*parts: str) -> str:
    """SHA-256 of the parts as 64 hex digits; the parts are length-prefixed, so ("ab", "c") != ("a", "bc")."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode()
        hasher.update(len(data).to_bytes(8, "big"))
        hasher.update(data)
    return hasher.hexdigest()
