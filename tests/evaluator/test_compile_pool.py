"""Builds in their isolation: right libraries, typed failures, limits, and nothing left behind."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evaluator.compile import CompileConfig, CompilePool, CompileRequest, discover, headers
from evaluator.compile.pool import sealed_copy

pytestmark = pytest.mark.skipif(not discover().cxx, reason="no C++ compiler on this machine")

ADD = 'extern "C" float add_one(float x) { return x + 1; }\n'
ENDLESS = """constexpr long f() { long s = 0; for (long i = 0; i < (1L << 40); ++i) s += i; return s; }
constexpr long v = f();
"""
ENDLESS_FLAGS = ("-fconstexpr-ops-limit=9000000000000", "-fconstexpr-loop-limit=2147483647")
GROWING = """template <class L, class R> struct P {};
template <int N, class T> struct G {
  typename G<N - 1, P<T, int>>::t a;
  typename G<N - 1, P<T, char>>::t b;
  using t = T;
};
template <class T> struct G<0, T> { using t = T; };
G<24, int> g;
"""


def _request(text: str, name: str = "k.cpp", **fields: object) -> CompileRequest:
    message = {"name": "k", "sources": [{"name": name, "text": text}], "torch": False, **fields}
    return CompileRequest.model_validate(message)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[CompilePool]:
    config = CompileConfig(cache_dir=str(tmp_path / "cache"), timeout_s=60, output_mib=64)
    with CompilePool(config) as made:
        yield made


def test_a_plain_library_is_built_isolated_and_found_again(pool: CompilePool) -> None:
    result = pool.compile(_request(ADD, cflags=("-O2 -fopenmp",)))
    assert result.ok, result.text
    assert "landlock" in result.isolation
    assert result.library is not None
    add = ctypes.CDLL(str(result.library)).add_one
    add.restype, add.argtypes = ctypes.c_float, [ctypes.c_float]
    assert add(2.0) == 3.0
    again = pool.compile(_request(ADD, cflags=("-O2 -fopenmp",)))
    assert again.cached
    assert again.library == result.library


def test_a_compile_error_names_the_candidates_own_line(pool: CompilePool) -> None:
    result = pool.compile(_request("int fine;\nint f() { return missing; }\n"))
    assert result.kind == "compile_error"
    assert (result.errors[0].file, result.errors[0].line) == ("k.cpp", 2)
    assert "missing" in result.message
    assert result.to_answer()["ok"] is False


def test_a_link_error_is_a_compile_error(pool: CompilePool) -> None:
    text = 'extern "C" int g(); extern "C" int f() { return g(); }'
    result = pool.compile(_request(text, ldflags=("-Wl,--no-undefined",)))
    assert result.kind == "compile_error"
    assert "undefined reference" in result.errors[0].message


def test_a_build_sees_no_file_outside_its_toolchain(pool: CompilePool, tmp_path: Path) -> None:
    secret = tmp_path / "secret.h"
    secret.write_text("int secret = 1;\n")
    for text in (f'#include "{secret}"\n', f'__asm__(".incbin \\"{secret}\\"");\n'):
        result = pool.compile(_request(text))
        assert result.kind == "compile_error"
    assert pool.compile(_request('#include "more/own.h"\nint x = own;', headers=[
        {"name": "more/own.h", "text": "constexpr int own = 3;"}])).ok  # fmt: skip


def test_a_build_over_its_time_is_ended(tmp_path: Path) -> None:
    with CompilePool(CompileConfig(cache_dir=str(tmp_path), timeout_s=0.5)) as pool:
        result = pool.compile(_request(ENDLESS, cflags=ENDLESS_FLAGS))
    assert result.kind == "timeout"
    assert "0.5 s" in result.message
    assert result.seconds < 5


def test_a_build_over_its_memory_is_ended(tmp_path: Path) -> None:
    with CompilePool(CompileConfig(cache_dir=str(tmp_path), memory_mib=256, timeout_s=60)) as pool:
        result = pool.compile(_request(GROWING))
    assert result.kind == "resource_abuse", result
    assert "over 256 MiB" in result.message


def test_a_build_that_writes_too_much_is_ended(tmp_path: Path) -> None:
    with CompilePool(CompileConfig(cache_dir=str(tmp_path), output_mib=1)) as pool:
        result = pool.compile(_request('__asm__(".data\\n.fill 4000000,1,7\\n");'))
    assert result.kind == "resource_abuse"


def test_equal_requests_at_a_time_are_one_build(pool: CompilePool) -> None:
    futures = [pool.submit(_request(ADD + "// together\n")) for _ in range(4)]
    results = [future.result(60) for future in futures]
    assert all(result.ok for result in results)
    assert len({result.seconds for result in results if not result.cached}) == 1


def test_a_quick_build_does_not_wait_for_slow_ones(tmp_path: Path) -> None:
    with CompilePool(CompileConfig(cache_dir=str(tmp_path), slow_jobs=1, timeout_s=5)) as pool:
        slow = [pool.submit(_request(ENDLESS + f"// {i}\n", torch=True, implicit_headers=False,
                                     cflags=ENDLESS_FLAGS)) for i in range(3)]  # fmt: skip
        quick = pool.compile(_request(ADD))
        assert quick.ok
        assert not slow[-1].done()


def test_a_worker_gets_a_copy_that_nobody_can_change(pool: CompilePool) -> None:
    answer, descriptor, result = pool.serve(_request(ADD).to_wire())
    assert answer == {"op": "compiled", "ok": True, "name": "k", "text": ""}
    assert descriptor is not None
    assert result.library is not None
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    assert os.pread(descriptor, 1 << 24, 0) == result.library.read_bytes()
    os.close(descriptor)
    other = sealed_copy(result.library)
    os.close(other)


@pytest.mark.skipif(not discover().nvcc, reason="no nvcc on this machine")
def test_cuda_behind_an_extern_c_launcher_is_built(pool: CompilePool) -> None:
    text = '__global__ void k(float* x) { x[0] = 1; }\nextern "C" int go(float* x) { k<<<1, 1>>>(x); return 0; }\n'
    result = pool.compile(_request(text, "k.cu", cuda_cflags=("-arch=sm_90",)))
    assert result.ok, result.text
    wrong = pool.compile(_request("\n__global__ void k(float* x) { x[0] = y; }\n", "k.cu"))
    assert (wrong.errors[0].file, wrong.errors[0].line) == ("k.cu", 2)


def test_nothing_of_a_build_outlives_its_pools_process(tmp_path: Path) -> None:
    marker = f"MARK_{os.getpid()}"
    program = (
        "import sys, os, time\n"
        "from evaluator.compile import CompilePool, CompileConfig, CompileRequest\n"
        f"pool = CompilePool(CompileConfig(cache_dir={str(tmp_path)!r}))\n"
        "request = CompileRequest.model_validate({'name': 'k', 'torch': False, 'sources': [{'name': 'k.cpp', 'text': "
        f"{ENDLESS!r}}}], 'cflags': {[*ENDLESS_FLAGS, '-D' + marker]!r}}})\n"
        "pool.submit(request)\nprint('asked', flush=True)\ntime.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"asked\n"
        assert _until(lambda: bool(_processes(marker)))
    finally:
        owner.kill()
        owner.wait()
    assert _until(lambda: not _processes(marker))


def _processes(marker: str) -> list[str]:
    """Compilers at work on the marked source."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if b"cc1plus" in line and marker.encode() in line:
                found.append(entry.name)
    return found


def _until(condition: Callable[[], bool], timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_lost_server_is_replaced(pool: CompilePool) -> None:
    assert pool.compile(_request(ADD)).ok
    server = pool._builder._owned
    assert server is not None
    server.stop()
    assert pool.compile(_request(ADD + "// after\n")).ok


def test_without_any_layer_nothing_untrusted_is_built(pool: CompilePool) -> None:
    pool._limits = dataclasses.replace(pool._limits, layers=())
    result = pool.compile(_request(ADD + "// open\n"))
    assert result.kind == "sandbox_unavailable"
    pool._limits = dataclasses.replace(pool._limits, allow_unsandboxed=True)
    assert pool.compile(_request(ADD + "// open\n")).ok
    assert pool.compile(_request(ADD + "// open again\n")).ok
    assert not [path for path in Path(pool._limits.fallback_scratch).iterdir() if path.is_dir()]


def test_compilers_keep_to_their_cores(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with CompilePool(CompileConfig(cache_dir=str(tmp_path), timeout_s=20), cores=(core,)) as pool:
        marker = f"CORE_{os.getpid()}"
        future = pool.submit(_request(ENDLESS, cflags=(*ENDLESS_FLAGS, f"-D{marker}")))
        assert _until(lambda: bool(_processes(marker)))
        assert [os.sched_getaffinity(int(pid)) for pid in _processes(marker)] == [{core}]
        pool.close()
        assert future.result(20).kind == "evaluator_lost"
    assert _until(lambda: not _processes(marker))


def test_an_artefacts_name_does_not_depend_on_a_precompiled_header(pool: CompilePool, tmp_path: Path) -> None:
    header = pool._headers.key(_request("int x;", torch=True), pool.tools)
    assert header
    assert not pool._headers.find(header)
    folder = tmp_path / "cache" / "headers" / header / "torch"
    folder.mkdir(parents=True)
    (folder / "extension.h.gch").write_bytes(b"")
    assert pool._headers.find(header) == str(folder.parent)
    assert pool._headers.key(_request("__global__ void k();", "k.cu", torch=True), pool.tools) == ""


def test_a_header_is_due_once_after_enough_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "_memory_free_mib", lambda: 1 << 20)
    store = headers.HeaderStore(tmp_path, 4096, after=3)
    assert [store.due("k") for _ in range(5)] == [False, False, True, False, False]
    monkeypatch.setattr(headers, "_memory_free_mib", lambda: 100)
    assert not any(store.due("other") for _ in range(5))
    assert headers.HeaderStore(tmp_path, 0, after=1).key(_request("int x;", torch=True), discover()) == ""


def test_old_headers_make_room(tmp_path: Path) -> None:
    store = headers.HeaderStore(tmp_path, 0, after=1)
    for key in ("one", "two"):
        path, descriptor = store.partial()
        os.write(descriptor, bytes(10))
        os.close(descriptor)
        store.publish(key, path)
    assert store.find("one") == store.find("two") == ""
    assert not list((tmp_path / "partial").iterdir())
