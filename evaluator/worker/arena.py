"""Arenas: memory that two processes map, passed by descriptor.

Invariants: a memfd is sealed against shrinking, growing and further seals before anybody else gets it, so that no
holder can make another fault; every tensor lies at a multiple of 512 bytes between guard bands of a secret byte
pattern; offsets vary from placement to placement. On CUDA an arena is an allocation of its own exported by an IPC
handle; `Arena` is the seam: what lies above it knows offsets, never how the memory is shared.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
from dataclasses import dataclass

ALIGNMENT = 512
GUARD_BYTES = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class Slot:
    """A place for one tensor's storage in an arena, in bytes."""

    offset: int
    nbytes: int


class Arena:
    """One mapping of a memfd; `create` makes and seals the memory, `attach` maps a descriptor that came by wire."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.memory = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)

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
        """Maps a received descriptor and closes it: the mapping keeps the memory."""
        arena = cls(descriptor, os.fstat(descriptor).st_size)
        arena.release_descriptor()
        return arena

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
