"""Arenas: sealed memory, aligned slots, guard bands that never overlap a neighbour."""

from __future__ import annotations

import os
import random
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluator.worker.arena import ALIGNMENT, GUARD_BYTES, Arena, Slot, layout


def test_a_sealed_arena_can_be_neither_shrunk_nor_grown() -> None:
    """A worker that truncates the memory would fault the server that reads it."""
    arena = Arena.create(10_000)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, size)
    arena.close()


def test_both_mappings_show_the_same_bytes() -> None:
    ours = Arena.create(4096)
    theirs = Arena.attach(os.dup(ours.descriptor))
    ours.memory[100:103] = b"abc"
    assert theirs.memory[100:103] == b"abc"
    assert theirs.descriptor == -1
    theirs.close()
    ours.close()
    ours.close()


@given(st.lists(st.integers(0, 100_000), max_size=12), st.integers(0, 1 << 32))
def test_slots_are_aligned_and_their_guards_apart(sizes: list[int], seed: int) -> None:
    slots, total = layout(sizes, random.Random(seed))
    end = 0
    for slot, size in zip(slots, sizes, strict=True):
        assert slot.nbytes == size
        assert slot.offset % ALIGNMENT == 0
        assert slot.offset - GUARD_BYTES >= end
        end = slot.offset + size + GUARD_BYTES
    assert end <= max(total, GUARD_BYTES)


def test_offsets_vary_from_placement_to_placement() -> None:
    placements = {tuple(slot.offset for slot in layout([100] * 4, random.Random(seed))[0]) for seed in range(20)}
    assert len(placements) > 15


def test_an_attached_arena_has_its_pages() -> None:
    """No page fault of a worker falls into a timed turn: touching 16 MiB takes a handful of faults at most."""
    made = Arena.create(16 << 20)
    attached = Arena.attach(os.dup(made.descriptor))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    attached.fill(Slot(0, 16 << 20), 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 256
