"""What the judge accepts: three presets, each key of which can be set on its own.

The keys forgive policies (whose work, which precision, how long a result lives); no rule forgives a forged, escaped,
stale, tampered or constant result.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tasks.config import Section
from tasks.records.evaluation import RulesName

MIB = 1024 * 1024


class Rules(Section):
    """The judge's rules; the defaults are the preset `strict`, whose accepted speedups are the reward."""

    name: RulesName = "strict"
    """Preset that these rules started from."""
    own_work: Literal["own", "labelled"] = "own"
    """`own` refuses a fallback (the reference's class, a compiler wrapper, a handler's or an idle kernel's result);
    `labelled` accepts them with a label."""
    precision: Literal["declared", "loose", "as_given"] = "declared"
    """`declared` holds the error budget of the task's precision; `loose` is 1e-2 absolute plus 1e-2 relative, as
    CUDA-L1; `as_given` is loose and lets an output have another floating type."""
    output_lifetime: Literal["caller", "next_call"] = "caller"
    """A result belongs to the caller for good, or only until the next call."""
    weights: Literal["loaded", "seeded"] = "loaded"
    """`loaded`: parameters are inputs and change between calls; `seeded`: they stay as constructed."""
    domain: Literal["whole", "drawn"] = "whole"
    """`whole`: also inputs drawn shifted, scaled and sign-flipped count; `drawn`: only those that get_inputs draws."""
    growth_bytes: int = Field(default=256 * MIB, ge=0)
    """Memory that may be kept after the first call, at least."""
    growth_calls: float = Field(default=4.0, ge=0)
    """Memory that may be kept after the first call, in multiples of one call's inputs and outputs."""

    @classmethod
    def preset(cls, name: RulesName, **overrides: Any) -> Rules:
        """The named preset with single keys replaced; raises pydantic.ValidationError on an unknown key or value."""
        return cls(**{**PRESETS[name], "name": name, **overrides})


PRESETS: dict[RulesName, dict[str, Any]] = {
    "strict": {},
    "paper": {
        "own_work": "labelled",
        "precision": "loose",
        "output_lifetime": "next_call",
        "weights": "seeded",
        "domain": "drawn",
    },
    "any": {
        "own_work": "labelled",
        "precision": "as_given",
        "output_lifetime": "next_call",
        "weights": "seeded",
        "domain": "drawn",
    },
}
