"""Prompts out, samples in.

Invariants: code in a prompt is never cut; exemplars are shown worst first, each with its measured speedup; every
requested sample leaves exactly once; tokens, log-probabilities and policy versions of a sample belong together; weights
never change during a step. Importing this package needs neither torch nor an engine.
"""

from rollout.config import RolloutConfig
from rollout.parse import ParsedCompletion, parse_completion, render_completion
from rollout.prompt import PromptTooLong, build_prompt
from rollout.samples import to_sample

__all__ = [
    "ParsedCompletion", "PromptTooLong", "RolloutConfig", "build_prompt", "parse_completion", "render_completion",
    "to_sample",
]  # fmt: skip
