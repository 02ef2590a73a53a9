"""Probe: which isolation a CUDA worker survives, and what the evaluator's design takes as known about CUDA.

    python scripts/probe_cuda_ipc.py OUT.jsonl        # on a machine with one NVIDIA GPU, about 90 s

A server process owns allocations of its own and exports them by legacy CUDA IPC handles, as raw bytes. Workers are
forked from a process that imported torch and never touched CUDA, isolate themselves layer by layer, open the handle,
read and write through it, seal themselves and go on computing. One JSON line per experiment.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
from landlockpy import AccessFS, Ruleset
from seccompy import ArgCmp, CmpOp, Filter, FilterFlag

NAMESPACES = {"user": 0x10000000, "mount": 0x20000, "net": 0x40000000, "ipc": 0x08000000, "pid": 0x20000000}
MATRIX = [
    (), ("net",), ("ipc",), ("mount",), ("user",), ("pid",),
    ("user", "mount", "net"), ("user", "mount", "net", "ipc"), ("user", "mount", "net", "pid"),
    ("user", "mount", "net", "ipc", "pid"),
]  # fmt: skip
BYTES = 64 << 20
LIBC = ctypes.CDLL(None, use_errno=True)


class DeviceArray:
    """Raw device memory as something torch.as_tensor reads without a copy."""

    def __init__(self, pointer: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<f4", "data": (pointer, False), "version": 3, "strides": None,
        }  # fmt: skip


def as_tensor(pointer: int, count: int) -> torch.Tensor:
    return torch.as_tensor(DeviceArray(pointer, count), device="cuda")


def cudart() -> Any:
    return torch.cuda.cudart()


def runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded, for calls torch does not wrap."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcudart" in line:
            return ctypes.CDLL(line.split()[-1])
    raise RuntimeError("libcudart is not loaded")


def check(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"{what}: CUDA error {code}")


class Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


def export() -> tuple[int, bytes]:
    rt, pointer, handle = runtime(), ctypes.c_void_p(), Handle()
    check(rt.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(BYTES)), "cudaMalloc")
    check(rt.cudaIpcGetMemHandle(ctypes.byref(handle), pointer), "cudaIpcGetMemHandle")
    return int(pointer.value or 0), bytes(ctypes.string_at(ctypes.byref(handle), 64))


def open_handle(raw: bytes) -> int:
    rt, pointer, handle = runtime(), ctypes.c_void_p(), Handle()
    ctypes.memmove(ctypes.byref(handle), raw, 64)
    rt.cudaIpcOpenMemHandle.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
    check(rt.cudaIpcOpenMemHandle(ctypes.byref(pointer), handle, 1), "cudaIpcOpenMemHandle")
    return int(pointer.value or 0)


def isolate(namespaces: tuple[str, ...], landlock: bool, uid: int | None) -> list[str]:
    on = []
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        LIBC.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else /proc/self belongs to root
        on.append(f"uid{uid}")
    if namespaces:
        outer = (os.getuid(), os.getgid())
        flags = 0
        for name in namespaces:
            flags |= NAMESPACES[name]
        if LIBC.unshare(flags) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        if "user" in namespaces:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{outer[0]} {outer[0]} 1")
            Path("/proc/self/gid_map").write_text(f"{outer[1]} {outer[1]} 1")
        on += list(namespaces)
    if "pid" in namespaces:
        child = os.fork()
        if child:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    if "mount" in namespaces:
        LIBC.mount(b"none", b"/", None, 0x44000, None)
        for target in (b"/dev/shm", b"/tmp/probe"):
            if LIBC.mount(b"tmpfs", target, b"tmpfs", 6, b"size=64m") != 0:
                on.append(f"no tmpfs {target.decode()} errno {ctypes.get_errno()}")
        if "pid" in namespaces and LIBC.mount(b"proc", b"/proc", b"proc", 14, None) != 0:
            on.append(f"no proc errno {ctypes.get_errno()}")
    if landlock:
        read = AccessFS.READ_FILE | AccessFS.READ_DIR | AccessFS.EXECUTE
        with Ruleset() as rules:
            for path in ("/usr", "/lib", "/lib64", "/bin", "/opt", "/etc", "/sys", "/tmp/site", "/run"):
                if os.path.exists(path):
                    rules.allow_path(path, read)
            rules.allow_path("/proc", read | AccessFS.WRITE_FILE | AccessFS.TRUNCATE)
            rules.allow_path("/dev", rules.handled_fs)
            rules.allow_path("/tmp/probe", rules.handled_fs)
            rules.restrict()
        on.append("landlock")
    return on


def seal() -> None:
    """No exec and no new process, in every thread; threads stay allowed."""
    rules = Filter(flags=FilterFlag.TSYNC)
    for name in ("execve", "execveat", "fork", "vfork", "setsid", "setpgid", "ptrace", "process_vm_readv"):
        rules.errno(name, errno.EPERM)
    rules.errno("clone3", errno.ENOSYS)
    rules.errno("clone", errno.EPERM, args=[ArgCmp(0, CmpOp.MASKED_EQ, 0, 0x10000)])
    rules.load()


def worker(raw: bytes, namespaces: tuple[str, ...], landlock: bool, uid: int | None, extra: Callable | None) -> dict:
    began = time.perf_counter()
    out: dict[str, Any] = {"layers": isolate(namespaces, landlock, uid)}
    out["isolate_ms"] = round(1e3 * (time.perf_counter() - began), 2)
    began = time.perf_counter()
    torch.zeros(1, device="cuda")
    out["context_ms"] = round(1e3 * (time.perf_counter() - began), 1)
    began = time.perf_counter()
    shared = as_tensor(open_handle(raw), BYTES // 4)
    out["open_ms"] = round(1e3 * (time.perf_counter() - began), 2)
    out["reads"] = bool((shared[:1024] == 7.0).all())
    shared[:1024] = 11.0
    torch.cuda.synchronize()
    if extra is not None:
        out.update(extra(shared))
    began = time.perf_counter()
    seal()
    out["seal_ms"] = round(1e3 * (time.perf_counter() - began), 2)
    a = torch.randn(512, 512, device="cuda")
    out["computes_sealed"] = bool(torch.isfinite(a @ a).all())
    try:
        subprocess.run(["/bin/true"], check=False)
        out["exec_sealed"] = "ran"
    except OSError as error:
        out["exec_sealed"] = error.strerror
    return out


def toolchain(shared: torch.Tensor) -> dict[str, Any]:
    """The load phase of a landlocked worker: nvcc by exec, NVRTC in the process, Triton with its launcher stub."""
    os.environ.update(TRITON_CACHE_DIR="/tmp/probe/triton", HOME="/tmp/probe", TMPDIR="/tmp/probe")
    tempfile.tempdir = "/tmp/probe"
    out: dict[str, Any] = {}
    source = Path("/tmp/probe/k.cu")
    source.write_text('extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1.f; }')
    for name, action in {"nvcc": nvcc, "nvrtc": nvrtc, "triton": triton_kernel}.items():
        began = time.perf_counter()
        try:
            out[name] = action(shared)
        except Exception as error:  # noqa: BLE001 - a probe reports whatever happened
            out[name] = f"{type(error).__name__}: {error}"[:400]
        out[f"{name}_s"] = round(time.perf_counter() - began, 2)
    return out


def nvcc(_: torch.Tensor) -> str:
    run = subprocess.run(
        ["nvcc", "-cubin", "-arch=sm_90", "-o", "/tmp/probe/k.cubin", "/tmp/probe/k.cu"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "ok" if run.returncode == 0 else run.stderr[-300:]


def nvrtc(shared: torch.Tensor) -> str:
    kernel = torch.cuda._compile_kernel('extern "C" __global__ void add1(float* x) { x[threadIdx.x] += 1.f; }', "add1")
    before = float(shared[0])
    kernel((1, 1, 1), (32, 1, 1), (shared,))
    return "ok" if float(shared[0]) == before + 1 else "wrong"


def triton_kernel(shared: torch.Tensor) -> str:
    folder = Path("/tmp/probe")
    (folder / "tk.py").write_text(
        "import triton, triton.language as tl\n@triton.jit\ndef inc(x, n, B: tl.constexpr):\n"
        "    o = tl.program_id(0) * B + tl.arange(0, B)\n    m = o < n\n"
        "    tl.store(x + o, tl.load(x + o, m) + 1, m)\n"
    )
    sys.path.insert(0, str(folder))
    import tk

    before = float(shared[0])
    tk.inc[(1,)](shared, 32, B=32)
    return "ok" if float(shared[0]) == before + 1 else "wrong"


def forked(action: Callable[[], dict], timeout_s: float = 60) -> tuple[int, Callable[[], dict]]:
    """Runs `action` in a forked child; returns its pid and a function that waits for the JSON it reports."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        os.setpgid(0, 0)
        signal.alarm(int(timeout_s))
        try:
            result = action()
        except BaseException as error:  # noqa: BLE001 - a probe reports whatever happened
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        os.write(write_end, json.dumps(result).encode())
        os._exit(0)
    os.close(write_end)

    def wait() -> dict:
        data = b""
        while chunk := os.read(read_end, 65536):
            data += chunk
        os.close(read_end)
        status = os.waitpid(pid, 0)[1]
        return json.loads(data) if data else {"error": f"no report, status {os.waitstatus_to_exitcode(status)}"}

    return pid, wait


class Server:
    """A process with a context and one exported allocation; answers one-word requests over pipes."""

    def __init__(self) -> None:
        ask_r, ask_w = os.pipe()
        say_r, say_w = os.pipe()
        if os.fork() == 0:
            os.close(ask_w)
            os.close(say_r)
            self._serve(ask_r, say_w)
            os._exit(0)
        os.close(ask_r)
        os.close(say_w)
        self._ask, self._say = os.fdopen(ask_w, "w"), os.fdopen(say_r)
        self.handle = bytes.fromhex(self.call("handle")["handle"])

    def call(self, word: str) -> dict:
        self._ask.write(word + "\n")
        self._ask.flush()
        return json.loads(self._say.readline())

    @staticmethod
    def _serve(ask: int, say: int) -> None:
        torch.zeros(1, device="cuda")
        pointer, raw = export()
        mine = as_tensor(pointer, BYTES // 4)
        secret = torch.full((1024,), 42.0, device="cuda")  # in torch's pool, beside what follows
        pooled = torch.full((1024,), 5.0, device="cuda")
        with os.fdopen(say, "w") as out:
            for line in os.fdopen(ask):
                word, began = line.strip(), time.perf_counter()
                reply: dict[str, Any] = {"handle": raw.hex()}
                if word == "fill":
                    mine.fill_(7.0)
                elif word == "peek":
                    torch.cuda.synchronize()
                    reply["first"] = float(mine[0])
                    reply["last"] = float(mine[-1])
                elif word == "work":
                    a = torch.randn(1024, 1024, device="cuda")
                    reply["finite"] = bool(torch.isfinite(a @ a).all())
                elif word == "memory":
                    reply["free_mib"] = torch.cuda.mem_get_info()[0] >> 20
                elif word == "pooled":
                    shared = pooled.untyped_storage()._share_cuda_()
                    reply.update(
                        pool_handle=shared[1].hex(), offset=shared[3], secret_at=secret.data_ptr() - pooled.data_ptr()
                    )
                torch.cuda.synchronize()
                reply["ms"] = round(1e3 * (time.perf_counter() - began), 2)
                out.write(json.dumps(reply) + "\n")
                out.flush()


def spin_then_write(raw: bytes, ms: float) -> dict:
    torch.zeros(1, device="cuda")
    shared = as_tensor(open_handle(raw), BYTES // 4)
    torch.cuda.synchronize()
    os.write(1, b"")
    torch.cuda._sleep(int(ms * 1.7e6))
    shared[:1024] = 99.0
    Path("/tmp/probe/launched").write_text("x")
    time.sleep(3)
    return {"launched": True}


def experiment_idle_and_stop(server: Server) -> dict:
    """Another context's kernel is invisible to the server's synchronize; SIGSTOP does not stop queued GPU work."""
    Path("/tmp/probe/launched").unlink(missing_ok=True)
    server.call("fill")
    pid, wait = forked(lambda: spin_then_write(server.handle, 800))
    while not Path("/tmp/probe/launched").exists():
        time.sleep(0.002)
    os.kill(pid, signal.SIGSTOP)
    began, seen = time.perf_counter(), []
    while time.perf_counter() - began < 2.0:
        seen.append((round(time.perf_counter() - began, 3), server.call("peek")))
        if seen[-1][1]["first"] == 99.0:
            break
        time.sleep(0.02)
    os.kill(pid, signal.SIGCONT)
    wait()
    return {
        "first_sync_ms": seen[0][1]["ms"], "first_value": seen[0][1]["first"],
        "value_arrived_after_s": seen[-1][0] if seen[-1][1]["first"] == 99.0 else None,
    }  # fmt: skip


def experiment_kill(server: Server) -> dict:
    server.call("fill")
    before = server.call("memory")["free_mib"]

    def hoard() -> dict:
        torch.zeros(1, device="cuda")
        as_tensor(open_handle(server.handle), BYTES // 4)[:8] = 1.0
        kept = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
        Path("/tmp/probe/hoard").write_text(str(kept.numel()))
        time.sleep(30)
        return {}

    Path("/tmp/probe/hoard").unlink(missing_ok=True)
    pid, wait = forked(hoard)
    while not Path("/tmp/probe/hoard").exists():
        time.sleep(0.01)
    during = server.call("memory")["free_mib"]
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    wait()
    reaped = time.perf_counter() - began
    after = server.call("memory")["free_mib"]
    return {
        "free_mib": [before, during, after],
        "kill_to_reaped_s": round(reaped, 3),
        "server_works": server.call("work")["finite"],
    }


def experiment_fault(server: Server) -> dict:
    def fault() -> dict:
        x = torch.zeros(10, device="cuda")
        y = x[torch.tensor([10_000_000], device="cuda")]
        torch.cuda.synchronize()
        return {"value": float(y)}

    _, wait = forked(fault)
    return {"worker": str(wait())[:160], "server_works": server.call("work")["finite"]}


def experiment_pool(server: Server) -> dict:
    told = server.call("pooled")

    def steal() -> dict:
        torch.zeros(1, device="cuda")
        base = open_handle(bytes.fromhex(told["pool_handle"])[-64:])
        at = base + told["offset"] + told["secret_at"]
        return {"secret_read": float(as_tensor(at, 1)[0])}

    _, wait = forked(steal)
    return {"offset": told["offset"], **wait()}


def main() -> None:
    os.makedirs("/tmp/probe", exist_ok=True)
    os.chmod("/tmp/probe", 0o777)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if torch.cuda.is_initialized():
        raise SystemExit("this process must not touch CUDA before it forks")
    server = Server()
    rows: list[dict[str, Any]] = [
        {"experiment": "host", "torch": torch.__version__, "kernel": os.uname().release, "uid": os.getuid()}
    ]
    cases = [(names, False, None, None) for names in MATRIX]
    cases += [((), True, None, None), (MATRIX[-2], True, None, None), (MATRIX[-1], True, None, toolchain)]
    cases += [(("user", "mount", "net"), True, None, toolchain), (MATRIX[-1], True, 65534, None)]
    for names, landlock, uid, extra in cases:
        server.call("fill")
        _, wait = forked(lambda n=names, ll=landlock, u=uid, e=extra: worker(server.handle, n, ll, u, e))
        row = {
            "experiment": "isolation",
            "namespaces": "+".join(names) or "none",
            "landlock": landlock,
            "uid": uid,
            **wait(),
        }
        row["server_sees_write"] = server.call("peek")["first"] != 7.0
        rows.append(row)
        print(json.dumps(row), flush=True)
    for experiment in (experiment_idle_and_stop, experiment_kill, experiment_fault, experiment_pool):
        name = experiment.__name__.removeprefix("experiment_")
        try:
            row = {"experiment": name, **experiment(server)}
        except Exception as error:  # noqa: BLE001 - a probe reports whatever happened
            row = {"experiment": name, "error": f"{type(error).__name__}: {error}"[:400]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
