"""Tiles cover every element once, never span large entries, and need no large temporary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluator.reference.tiles import TILE, chunks

SHAPES = [(), (1,), (7,), (1500,), (5000, 3), (3, 5000), (7, 1024), (2, 3, 70, 90), (2, 600_000), (1, 1), (2000, 2000)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("column_major", [False, True])
def test_every_element_is_in_one_tile_at_its_flat_index(shape: tuple[int, ...], column_major: bool) -> None:
    count = torch.Size(shape).numel()
    numbers = torch.arange(count, dtype=torch.float64).reshape(shape)
    if column_major and numbers.dim() >= 2:
        numbers = numbers.transpose(0, -1).contiguous().transpose(0, -1)
    seen = torch.zeros(count, dtype=torch.int64)
    for chunk in chunks(numbers):
        (values,) = chunk.parts
        inside = torch.arange(values.shape[1]) < chunk.counts[:, None]
        seen[values[inside].long()] += 1
        assert bool((values[~inside] == 0).all())
        for tile in (0, values.shape[0] - 1):
            for position in (0, int(chunk.counts[tile]) - 1):
                assert values[tile, position] == chunk.flat_index(tile, position)
    assert bool((seen == 1).all())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(16, 5000))
def test_counts_add_up_and_no_tile_is_too_large(shape: list[int], limit: int) -> None:
    values = torch.zeros(shape)
    total = 0
    for chunk in chunks(values, limit=limit):
        assert chunk.parts[0].shape[1] <= max(TILE, 1)
        assert chunk.parts[0].numel() <= 2 * max(limit, TILE)
        total += int(chunk.counts.sum())
    assert total == values.numel()


def test_large_entries_have_tiles_of_their_own() -> None:
    """Entries of 1500 elements: two tiles of 750 each, none with elements of two entries."""
    entries = torch.arange(4.0)[:, None].expand(4, 1500)
    (chunk,) = chunks(entries)
    assert chunk.parts[0].shape == (8, 750)
    assert bool((chunk.parts[0] == chunk.parts[0][:, :1]).all())


def test_an_empty_tensor_has_no_chunk() -> None:
    assert list(chunks(torch.zeros(0, 4))) == []
