"""Attention over rows that hold several sequences, without padding and without a dense mask.

A row is a list of segments. Each attends causally to itself and fully to its prefix, an earlier range of the row: so
the samples of one prompt share the prompt's tokens, which are computed once. Invariant: positions (rotary embedding)
restart for each sequence, so log-probabilities equal those of the sequence alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ATTENTION_NAME = "kontrast_segments"


@dataclass(frozen=True)
class Segment:
    """Tokens `start:stop` of a row, which also see tokens `prefix_start:prefix_stop` (empty: none)."""

    start: int
    stop: int
    prefix_start: int = 0
    prefix_stop: int = 0


def segment_attention(
    module: Any,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,  # noqa: ARG001
    *,
    scaling: float | None = None,
    segments: tuple[Segment, ...] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a Hugging Face decoder layer; query `[b, heads, t, d]`, key and value `[b, kv_heads, t, d]`.

    Without segments every row is one sequence, causal, padded on the right: padding needs no mask, since no real
    token comes after it. Returns `[b, t, heads, d]`.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    if segments is None:
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return output.transpose(1, 2).contiguous(), None
    parts = []
    for segment in segments:
        own = slice(segment.start, segment.stop)
        q, k, v = query[:, :, own], key[:, :, own], value[:, :, own]
        prefix = slice(segment.prefix_start, segment.prefix_stop)
        length = segment.stop - segment.start
        seen = segment.prefix_stop - segment.prefix_start
        if seen == 0:
            parts.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling))
            continue
        k, v = torch.cat([key[:, :, prefix], k], dim=2), torch.cat([value[:, :, prefix], v], dim=2)
        mask = torch.ones(length, seen + length, dtype=torch.bool, device=query.device).tril(diagonal=seen)
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def register() -> str:
    """Makes the attention known to transformers; returns the name to give as `attn_implementation`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, segment_attention)
    return ATTENTION_NAME
