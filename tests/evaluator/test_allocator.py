"""The arms' allocator: right for every size and call, and the same for two processes with different pasts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from evaluator.worker import allocator, wire
from evaluator.worker.process import Zygote
from evaluator.worker.sandbox import SandboxPlan


@pytest.fixture(scope="module")
def library() -> Iterator[int]:
    descriptor = allocator.build()
    yield descriptor
    os.close(descriptor)


def run(library: int, source: str) -> Any:
    """What the source prints as JSON, run under the allocator."""
    code = textwrap.dedent(source)
    done = subprocess.run(
        [sys.executable, "-c", code], env={"OMP_NUM_THREADS": "1", **allocator.variables(library)},
        pass_fds=[library], capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


CALLS = """
    import ctypes, json, random, threading
    libc = ctypes.CDLL(None)
    V, S = ctypes.c_void_p, ctypes.c_size_t
    for name, arguments in {"malloc": [S], "calloc": [S, S], "realloc": [V, S], "aligned_alloc": [S, S],
                            "memalign": [S, S], "malloc_usable_size": [V]}.items():
        function = getattr(libc, name)
        function.argtypes, function.restype = arguments, S if name == "malloc_usable_size" else V
    libc.free.argtypes, libc.free.restype = [V], None
    libc.posix_memalign.argtypes = [ctypes.POINTER(V), S, S]
"""


def test_every_call_gives_memory_of_its_own_that_keeps_what_is_written(library: int) -> None:
    """Random calls of random sizes around the threshold, in four threads: contents never change under the holder."""
    found = run(library, CALLS + """
    def get(rng, bytes_):
        kind = rng.choice(("malloc", "calloc", "aligned_alloc", "memalign", "posix_memalign"))
        if kind == "posix_memalign":
            pointer = V()
            assert libc.posix_memalign(ctypes.byref(pointer), 64, bytes_) == 0
            return pointer.value
        if kind == "calloc":
            pointer = libc.calloc(1, bytes_)
            assert ctypes.string_at(pointer, bytes_) == bytes(bytes_)
            return pointer
        return libc.malloc(bytes_) if kind == "malloc" else getattr(libc, kind)(rng.choice((16, 64, 4096)), bytes_)

    faults = []
    def work(seed):
        rng, held = random.Random(seed), []
        try:
            for _ in range(1500):
                if held and rng.random() < 0.5:
                    pointer, bytes_, mark = held.pop(rng.randrange(len(held)))
                    assert ctypes.string_at(pointer, bytes_) == mark * bytes_
                    assert libc.malloc_usable_size(pointer) >= bytes_
                    if rng.random() < 0.3:
                        more = rng.choice((100, 70_000, 300_000))
                        pointer = libc.realloc(pointer, more)
                        same = min(more, bytes_)
                        assert ctypes.string_at(pointer, same) == mark * same
                    libc.free(pointer)
                else:
                    bytes_ = rng.choice((10, 5_000, 65_535, 65_536, 65_537, 100_000, 1_000_000))
                    mark, pointer = bytes([rng.randrange(256)]), get(rng, bytes_)
                    assert pointer
                    ctypes.memset(pointer, mark[0], bytes_)
                    held.append((pointer, bytes_, mark))
        except BaseException as error:
            faults.append(repr(error))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(json.dumps(faults))
    """)  # fmt: skip
    assert found == []


def test_a_size_that_no_machine_has_is_refused(library: int) -> None:
    found = run(library, CALLS + """
    pointer = V()
    print(json.dumps([libc.malloc(1 << 62), libc.calloc(1 << 40, 1 << 40), libc.realloc(None, 1 << 62),
                      libc.posix_memalign(ctypes.byref(pointer), 64, 1 << 62),
                      libc.posix_memalign(ctypes.byref(pointer), 3, 100)]))
    """)  # fmt: skip
    assert found == [None, None, None, 12, 22]


PAST = """
    import json, random, resource, sys, torch
    rng = random.Random({seed})
    keep = []
    for _ in range({seed} * 300):  # a past: blocks of all sizes, some of which stay
        block = torch.empty(rng.randrange(1, 500_000))
        if rng.random() < 0.2:
            keep.append(block)
        if len(keep) > 20:
            keep.pop(rng.randrange(20))
    def call(x):
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * 2.0
    x = torch.randn(512, 3072)
    seen, names = [], {{}}
    for burst in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        results = [call(x) for _ in range(5)]
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        seen.append([names.setdefault(result.data_ptr(), len(names)) for result in results] + [faults > 1000])
        del results
    print(json.dumps(seen))
"""


def test_the_past_of_a_process_decides_nothing(library: int) -> None:
    """The same calls reuse the same blocks in the same order, whatever the process did before."""
    pasts = [run(library, PAST.format(seed=seed)) for seed in (0, 1, 3)]
    assert pasts[0][1:] == pasts[1][1:] == pasts[2][1:]
    assert not any(faulted for *_, faulted in pasts[0][1:]), "only the first burst meets new pages"


def test_what_was_freed_is_kept_until_it_is_given_back(library: int) -> None:
    found = run(library, """
    import ctypes, json, os, torch
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20
    release = ctypes.CDLL(None).kontrast_release
    before = resident()
    blocks = [torch.ones(16 << 20) for _ in range(4)]
    kept = blocks.pop()
    last_freed = blocks[0].data_ptr()
    del blocks
    after = resident()
    again = torch.ones(16 << 20)
    reused = again.data_ptr() == last_freed
    del again
    release()
    late = resident()
    total = sum(float(kept[i]) for i in (0, 1 << 20, -1))
    if (child := os.fork()) == 0:
        os._exit(0 if float(torch.ones(1 << 20).sum()) == 1 << 20 else 1)
    print(json.dumps([after - before, reused, late - before, total, os.waitpid(child, 0)[1]]))
    """)  # fmt: skip
    grown, reused, left, total, status = found
    assert grown > 240
    assert reused
    assert left < 100
    assert (total, status) == (3.0, 0)


def test_more_free_memory_than_is_kept_goes_back(library: int) -> None:
    found = run(library, """
    import json, os, torch
    peak = 0
    for mib in range(100, 700, 50):  # a new size each time, so nothing is reused
        del_me = torch.ones(mib << 18)
        del del_me
        peak = max(peak, int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20)
    print(json.dumps(peak))
    """)  # fmt: skip
    assert found < 2200


@pytest.mark.parametrize("compiler", [None, "/bin/false", "/bin/true"])
def test_without_a_compiler_or_a_linker_that_takes_it_there_is_none(
    compiler: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    allocator.library.cache_clear()
    assert allocator.library() == -1
    allocator.library.cache_clear()
    assert "the C library's allocator" in caplog.text
    assert allocator.variables(-1) == {}


def test_a_zygote_loads_it_and_hides_it(library: int) -> None:
    """Workers run with it; neither they nor the programs that they start are told of it."""
    with_it = probed(Zygote(allocator=library))
    assert with_it == {"loaded": True, "variable": None, "descriptor": False}
    assert probed(Zygote()) == {"loaded": False, "variable": None, "descriptor": False}


def probed(zygote: Zygote) -> Any:
    source = os.memfd_create("source")
    os.write(source, PROBE)
    zygote.start()
    try:
        child = zygote.spawn_worker(SandboxPlan())
        wire.receive(child.channel, 10.0)
        wire.send(child.channel, {"op": "load", "class_name": "ModelNew"}, [source])
        answer = wire.receive(child.channel, 10.0)
        child.kill()
    finally:
        os.close(source)
        zygote.close()
    return json.loads(answer["text"])


PROBE = b"""
import ctypes, json, os
links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
raise ValueError(json.dumps({
    "loaded": hasattr(ctypes.CDLL(None), "kontrast_release"), "variable": os.environ.get("LD_PRELOAD"),
    "descriptor": any("allocator" in os.readlink(link) for link in links if os.path.islink(link)),
}))
"""


def test_releasing_without_the_library_does_nothing() -> None:
    allocator.release()()
