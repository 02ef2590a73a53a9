"""Arenas: memory that two processes map, passed by descriptor.

Invariants: a memfd is sealed against shrinking, growing and further seals before anybody else gets it, so that no
holder can make another fault; every tensor lies at a multiple of 512 bytes between guard bands of a secret byte
pattern; offsets vary from placement to placement. `Arena` is the seam between devices: what lies above it knows offsets
and these methods, never how the memory is shared (on CUDA: `arena_cuda`).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

ALIGNMENT = 512
GUARD_BYTES = 4096
_memmove, _memset = ctypes.memmove, ctypes.memset
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class Slot:
    """A place for one tensor's storage in an arena, in bytes."""

    offset: int
    nbytes: int


class Arena:
    """One mapping of a memfd; `create` makes and seals the memory, `attach` maps a descriptor that came by wire."""

    device = torch.device("cpu")

    def __init__(self, descriptor: int, nbytes: int, flags: int = mmap.MAP_SHARED) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.memory = mmap.mmap(descriptor, nbytes, flags)

    @classmethod
    def create(cls, nbytes: int) -> Arena:
        """New sealed memory of at least one page, zeroed."""
        nbytes = max(mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        descriptor = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return cls(descriptor, nbytes)

    @classmethod
    def attach(cls, descriptor: int) -> Arena:
        """Maps a received descriptor and closes it: the mapping keeps the memory.

        Its pages are there at once, so that no page fault falls into a timed turn.
        """
        arena = cls(descriptor, os.fstat(descriptor).st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        arena.release_descriptor()
        return arena

    @property
    def start(self) -> int:
        """Address of the mapping in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @property
    def handle(self) -> list[Any] | None:
        """What another process maps the memory by, where that is no descriptor."""
        return None

    def flat(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor object over `count` elements."""
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)

    def fill(self, slot: Slot, byte: int) -> None:
        """Sets every byte of a slot."""
        _memset(self.start + slot.offset, byte, slot.nbytes)

    def put(self, offset: int, address: int, nbytes: int) -> None:
        """Copies memory of this process into the arena."""
        _memmove(self.start + offset, address, nbytes)

    def copy_from(self, other: Self, slot: Slot) -> None:
        """Copies a slot from the same place in another arena."""
        _memmove(self.start + slot.offset, other.start + slot.offset, slot.nbytes)

    def differs(self, other: Self, slots: Sequence[Slot]) -> bool:
        """Whether any byte of the slots differs from the other arena's."""
        one, two = self.start, other.start
        return any(_memcmp(one + slot.offset, two + slot.offset, slot.nbytes) != 0 for slot in slots)

    def write(self, offset: int, data: bytes) -> None:
        """Writes bytes."""
        self.memory[offset : offset + len(data)] = data

    def unlike(self, offsets: Sequence[int], data: bytes) -> list[int]:
        """Numbers of the places that hold other bytes than `data`."""
        size = len(data)
        return [i for i, offset in enumerate(offsets) if self.memory[offset : offset + size] != data]

    def release(self) -> None:
        """Gives the mapping up in a process that may map others; on CUDA the backend decides when."""
        self.close()

    def release_descriptor(self) -> None:
        """Closes the descriptor, keeps the mapping."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Gives descriptor and mapping up; tensors that still view the mapping keep it until they are gone."""
        self.release_descriptor()
        try:
            self.memory.close()
        except BufferError:
            pass  # exported views remain; the mapping goes with the last of them


def layout(sizes: list[int], rng: random.Random) -> tuple[list[Slot], int]:
    """Slots for storages of `sizes` bytes with guard bands between them, and the bytes that all need."""
    slots = []
    cursor = GUARD_BYTES
    for nbytes in sizes:
        cursor += ALIGNMENT * rng.randrange(8)
        cursor = -(-cursor // ALIGNMENT) * ALIGNMENT
        slots.append(Slot(cursor, nbytes))
        cursor += nbytes + 2 * GUARD_BYTES
    return slots, cursor
