"""Arenas on a CUDA device: allocations of their own, exported by legacy IPC handles as raw bytes.

Invariants: an exported arena is one cudaMalloc allocation, never part of torch's pool, since a handle maps the whole
segment that it lies in; what has to stay private is never exported, whatever process it would go to; copies and fills
are queued, and who needs them done waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch

from evaluator.worker.arena import Arena, Slot

_WORD = torch.int64


class Runtime(Protocol):
    """The CUDA runtime as it is used here; `cudart.Runtime` has it, and tests one without a device."""

    device: torch.device

    def open(self) -> None: ...
    def malloc(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def export(self, address: int) -> bytes: ...
    def open_handle(self, raw: bytes) -> int: ...
    def close_handle(self, address: int) -> None: ...
    def copy(self, target: int, source: int, nbytes: int) -> None: ...
    def fill(self, address: int, byte: int, nbytes: int) -> None: ...
    def occupy(self, address: int, nbytes: int, lead_ns: int) -> None: ...
    def event(self) -> int: ...
    def record(self, event: int) -> None: ...
    def elapsed_ns(self, begin: int, end: int) -> int: ...
    def wait(self) -> None: ...
    def wait_stream(self) -> None: ...
    def reset_persisting_l2(self) -> None: ...
    def l2_bytes(self) -> int: ...
    def memory(self) -> tuple[int, int]: ...
    def tensor(self, address: int, nbytes: int) -> torch.Tensor: ...
    def trim(self) -> None: ...


class CudaArena(Arena):
    """Device memory at an address of this process; `raw` is its handle where it is exported from here."""

    def __init__(self, runtime: Runtime, address: int, nbytes: int, *, owned: bool, raw: bytes = b"") -> None:
        self.device = runtime.device
        self.descriptor = -1
        self.nbytes = nbytes
        self._runtime = runtime
        self._address = address
        self._owned = owned
        self._raw = raw

    @classmethod
    def make(cls, runtime: Runtime, nbytes: int, *, exported: bool) -> Self:
        """New memory, zeroed; raises what the runtime raises when there is not enough."""
        nbytes = max(4096, -(-nbytes // 4096) * 4096)
        address = runtime.malloc(nbytes)
        runtime.fill(address, 0, nbytes)
        return cls(runtime, address, nbytes, owned=True, raw=runtime.export(address) if exported else b"")

    @classmethod
    def opened(cls, runtime: Runtime, handle: list[Any]) -> Self:
        """Maps what came by wire; raises ValueError for anything that is no handle."""
        text, nbytes = handle
        if not isinstance(text, str) or type(nbytes) is not int or nbytes <= 0:
            raise ValueError("an arena is [handle, bytes]")
        return cls(runtime, runtime.open_handle(bytes.fromhex(text)), nbytes, owned=False)

    @property
    def start(self) -> int:
        return self._address

    @property
    def handle(self) -> list[Any] | None:
        return [self._raw.hex(), self.nbytes] if self._raw else None

    def flat(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self._runtime.tensor(self._address + offset, count * dtype.itemsize).view(dtype)

    def fill(self, slot: Slot, byte: int) -> None:
        if slot.nbytes:
            self._runtime.fill(self._address + slot.offset, byte, slot.nbytes)

    def put(self, offset: int, address: int, nbytes: int) -> None:
        if nbytes:
            self._runtime.copy(self._address + offset, address, nbytes)

    def copy_from(self, other: Self, slot: Slot) -> None:
        self.put(slot.offset, other.start + slot.offset, slot.nbytes)

    def differs(self, other: Self, slots: Sequence[Slot]) -> bool:
        found = [_unequal(self._words(slot), other._words(slot)) for slot in slots if slot.nbytes]
        return bool(torch.stack(found).any()) if found else False

    def _words(self, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        """A slot as 8-byte words, and the bytes after the last of them."""
        tensor = self._runtime.tensor(self._address + slot.offset, slot.nbytes)
        whole = slot.nbytes - slot.nbytes % _WORD.itemsize
        return tensor[:whole].view(_WORD), tensor[whole:]

    def write(self, offset: int, data: bytes) -> None:
        self._runtime.tensor(self._address + offset, len(data)).copy_(self._constant(data))

    def unlike(self, offsets: Sequence[int], data: bytes) -> list[int]:
        if not offsets:
            return []
        wanted = self._constant(data)
        places = torch.stack([self._runtime.tensor(self._address + offset, len(data)) for offset in offsets])
        return [int(i) for i in (places != wanted).any(dim=1).nonzero().flatten().tolist()]

    def _constant(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    def release(self) -> None:
        """The backend closes what it mapped."""

    def release_descriptor(self) -> None:
        """There is none."""

    def close(self) -> None:
        """Frees or unmaps the memory; tensors over it must not be used any more."""
        address, self._address = self._address, 0
        if address and self._owned:
            self._runtime.free(address)
        elif address:
            self._runtime.close_handle(address)


CHUNK_WORDS = 1 << 24


def _unequal(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Whether two runs of memory differ, as a tensor of one bool, in chunks so that no temporary is large."""
    found = (one[1] != other[1]).any()
    for low in range(0, one[0].numel(), CHUNK_WORDS):
        found = found | (one[0][low : low + CHUNK_WORDS] != other[0][low : low + CHUNK_WORDS]).any()
    return found
