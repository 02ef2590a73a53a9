"""Base of every configuration section."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of the configuration tree; an unknown key is an error, never ignored.

    Each field's doc string is its line in `docs/config.md`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
