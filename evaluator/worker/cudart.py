"""The CUDA runtime that torch has loaded, by ctypes: what torch does not wrap, and what must not go through Python.

Invariants: loading touches no device, so that it may happen before a fork; every function raises CudaError with the
runtime's own words; copies, fills, kernels and events are queued on the legacy default stream, which is torch's current
stream unless somebody changes it. The process sees one device, number 0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HANDLE_BYTES = 64
_DEVICE_TO_DEVICE = 3
_L2_CACHE_SIZE = 38
_PROCESSORS = 16
_THREADS_PER_PROCESSOR = 39
_LAZY_PEER_ACCESS = 1
_OCCUPY_THREADS = 512
"""Threads of a block of `occupy`: the resident threads of every processor since 2018 are a multiple of it."""
_OCCUPY = b"""
.version 6.0
.target sm_70
.address_size 64
.visible .entry occupy(.param .u64 base, .param .u64 words, .param .u64 lead)
{
    .reg .pred %p;
    .reg .b32 %r<5>;
    .reg .b64 %rd<10>;
    mov.u64 %rd0, %globaltimer;
    ld.param.u64 %rd1, [base];
    ld.param.u64 %rd2, [words];
    ld.param.u64 %rd3, [lead];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %nctaid.x;
    mov.u32 %r4, 0;
    mul.wide.u32 %rd4, %r0, %r1;
    cvt.u64.u32 %rd5, %r2;
    add.u64 %rd4, %rd4, %rd5;
    mul.wide.u32 %rd6, %r3, %r1;
WRITE:
    setp.ge.u64 %p, %rd4, %rd2;
    @%p bra WAIT;
    shl.b64 %rd7, %rd4, 4;
    add.u64 %rd7, %rd1, %rd7;
    st.global.v4.u32 [%rd7], {%r4, %r4, %r4, %r4};
    add.u64 %rd4, %rd4, %rd6;
    bra WRITE;
WAIT:
    mov.u64 %rd8, %globaltimer;
    sub.u64 %rd9, %rd8, %rd0;
    setp.lt.u64 %p, %rd9, %rd3;
    @%p bra WAIT;
    ret;
}
\0"""
"""PTX, which the driver translates for any device: writes memory, then waits until so many ns have passed."""


class CudaError(RuntimeError):
    """A call into the CUDA runtime failed."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class _DeviceArray:
    """Raw device memory as something that torch takes without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class Runtime:
    """One process's CUDA runtime on its only device."""

    device = torch.device("cuda:0")

    def __init__(self, library: str) -> None:
        lib = ctypes.CDLL(library)
        self._text = lib.cudaGetErrorString
        self._text.restype, self._text.argtypes = ctypes.c_char_p, [ctypes.c_int]
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._malloc = _bound(lib.cudaMalloc, ctypes.POINTER(pointer), size)
        self._free = _bound(lib.cudaFree, pointer)
        self._get_handle = _bound(lib.cudaIpcGetMemHandle, ctypes.POINTER(_Handle), pointer)
        self._open_handle = _bound(lib.cudaIpcOpenMemHandle, ctypes.POINTER(pointer), _Handle, ctypes.c_uint)
        self._close_handle = _bound(lib.cudaIpcCloseMemHandle, pointer)
        self._copy = _bound(lib.cudaMemcpyAsync, pointer, pointer, size, ctypes.c_int, pointer)
        self._set = _bound(lib.cudaMemsetAsync, pointer, ctypes.c_int, size, pointer)
        self._wait = _bound(lib.cudaDeviceSynchronize)
        self._wait_stream = _bound(lib.cudaStreamSynchronize, pointer)
        self._memory = _bound(lib.cudaMemGetInfo, ctypes.POINTER(size), ctypes.POINTER(size))
        self._attribute = _bound(lib.cudaDeviceGetAttribute, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int)
        self._reset_l2 = _bound(lib.cudaCtxResetPersistingL2Cache)
        self._make_event = _bound(lib.cudaEventCreate, ctypes.POINTER(pointer))
        self._record = _bound(lib.cudaEventRecord, pointer, pointer)
        self._elapsed = _bound(lib.cudaEventElapsedTime, ctypes.POINTER(ctypes.c_float), pointer, pointer)
        self._kernel = _Kernel(_OCCUPY, b"occupy")
        self._occupied = 0
        self._empty_cache: Callable[[], None] = getattr(torch._C, "_cuda_emptyCache", _nothing)

    def open(self) -> None:
        """Makes the context; raises CudaError or what torch raises."""
        torch.cuda.init()
        torch.zeros(1, device=self.device)
        self._kernel.load()
        self._occupied = self._asked(_PROCESSORS) * self._asked(_THREADS_PER_PROCESSOR)
        self.wait()

    def malloc(self, nbytes: int) -> int:
        """An allocation of its own; returns its address."""
        address = ctypes.c_void_p()
        self._check(self._malloc(ctypes.byref(address), nbytes), f"cudaMalloc of {nbytes} bytes")
        return int(address.value or 0)

    def free(self, address: int) -> None:
        """Frees an allocation."""
        self._check(self._free(address), "cudaFree")

    def export(self, address: int) -> bytes:
        """The legacy IPC handle of an allocation."""
        handle = _Handle()
        self._check(self._get_handle(ctypes.byref(handle), address), "cudaIpcGetMemHandle")
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open_handle(self, raw: bytes) -> int:
        """Maps another process's allocation; returns its address here."""
        if len(raw) != HANDLE_BYTES:
            raise CudaError(f"an IPC handle has {HANDLE_BYTES} bytes, not {len(raw)}")
        handle, address = _Handle(), ctypes.c_void_p()
        ctypes.memmove(ctypes.byref(handle), raw, HANDLE_BYTES)
        code = self._open_handle(ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
        self._check(code, "cudaIpcOpenMemHandle")
        return int(address.value or 0)

    def close_handle(self, address: int) -> None:
        """Unmaps what `open_handle` mapped."""
        self._check(self._close_handle(address), "cudaIpcCloseMemHandle")

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queues a copy on the default stream."""
        self._check(self._copy(target, source, nbytes, _DEVICE_TO_DEVICE, None), "cudaMemcpyAsync")

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Queues a fill on the default stream."""
        self._check(self._set(address, byte, nbytes, None), "cudaMemsetAsync")

    def occupy(self, address: int, nbytes: int, lead_ns: int) -> None:
        """Queues a kernel that overwrites the memory and ends no sooner than `lead_ns` after it began.

        It holds every thread that the device can have, so that no other stream's kernel runs beside it.
        """
        blocks = self._occupied // _OCCUPY_THREADS
        self._kernel.launch(blocks, _OCCUPY_THREADS, (address, nbytes // 16, lead_ns))

    def event(self) -> int:
        """A new event."""
        event = ctypes.c_void_p()
        self._check(self._make_event(ctypes.byref(event)), "cudaEventCreate")
        return int(event.value or 0)

    def record(self, event: int) -> None:
        """Queues the event: it happens when all earlier work of the default stream is done."""
        self._check(self._record(event, None), "cudaEventRecord")

    def elapsed_ns(self, begin: int, end: int) -> int:
        """Time between two events that have happened, by the device's clock (32 ns steps on an H200)."""
        milliseconds = ctypes.c_float()
        self._check(self._elapsed(ctypes.byref(milliseconds), begin, end), "cudaEventElapsedTime")
        return round(1e6 * milliseconds.value)

    def wait(self) -> None:
        """Waits for all work of this process, side streams included; raises the device's pending error."""
        self._check(self._wait(), "cudaDeviceSynchronize")

    def wait_stream(self) -> None:
        """Waits for the default stream alone."""
        self._check(self._wait_stream(None), "cudaStreamSynchronize")

    def reset_persisting_l2(self) -> None:
        """Turns lines that were made to persist in the L2 cache back into normal ones."""
        self._check(self._reset_l2(), "cudaCtxResetPersistingL2Cache")

    def l2_bytes(self) -> int:
        """Size of the L2 cache."""
        return self._asked(_L2_CACHE_SIZE)

    def _asked(self, attribute: int) -> int:
        value = ctypes.c_int()
        self._check(self._attribute(ctypes.byref(value), attribute, 0), "cudaDeviceGetAttribute")
        return value.value

    def memory(self) -> tuple[int, int]:
        """Free and total memory of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check(self._memory(ctypes.byref(free), ctypes.byref(total)), "cudaMemGetInfo")
        return free.value, total.value

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over device memory, which it does not own."""
        return torch.as_tensor(_DeviceArray(address, nbytes), device=self.device)

    def trim(self) -> None:
        """Gives torch's cached memory back."""
        self._empty_cache()

    def _check(self, code: int, what: str) -> None:
        if code != 0:
            raise CudaError(f"{what}: {self._text(code).decode()} (CUDA error {code})")


class _Kernel:
    """A kernel given as PTX; the library is the driver's, which is there wherever a device is."""

    def __init__(self, ptx: bytes, name: bytes) -> None:
        self._ptx, self._name = ptx, name
        self._function = ctypes.c_void_p()
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"there is no CUDA driver on this machine: {error}") from error
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        self._load = _bound(driver.cuModuleLoadData, ctypes.POINTER(pointer), ctypes.c_char_p)
        self._get = _bound(driver.cuModuleGetFunction, ctypes.POINTER(pointer), pointer, ctypes.c_char_p)
        self._launch = _bound(
            driver.cuLaunchKernel, pointer, *[number] * 7, pointer, ctypes.POINTER(pointer), ctypes.POINTER(pointer)
        )

    def load(self) -> None:
        """Translates it for the current context's device."""
        module = ctypes.c_void_p()
        self._check(self._load(ctypes.byref(module), self._ptx), "cuModuleLoadData")
        self._check(self._get(ctypes.byref(self._function), module, self._name), "cuModuleGetFunction")

    def launch(self, blocks: int, threads: int, arguments: tuple[int, ...]) -> None:
        """Queues it with 64-bit arguments on the default stream."""
        values = (ctypes.c_uint64 * len(arguments))(*arguments)
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(values) + 8 * i for i in range(len(arguments))))
        self._check(self._launch(self._function, blocks, 1, 1, threads, 1, 1, 0, None, places, None), "cuLaunchKernel")

    def _check(self, code: int, what: str) -> None:
        if code != 0:
            raise CudaError(f"{what} failed (CUDA driver error {code})")


def _nothing() -> None:
    """A torch without CUDA caches nothing."""


def _bound(function: Any, *argtypes: Any) -> Any:
    function.argtypes, function.restype = list(argtypes), ctypes.c_int
    return function


def load() -> Runtime:
    """The runtime library that this process's torch uses; raises CudaError for a torch without CUDA."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/libcudart" in line:
            return Runtime(line.split(maxsplit=5)[5])
    raise CudaError(f"torch {torch.__version__} has loaded no CUDA runtime: install a build with CUDA")
