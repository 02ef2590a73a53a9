"""What a candidate sees in a real sandbox: `load_inline` and `load` over the channel, and compilers it runs itself."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from evaluator.compile import CompileConfig, CompilePool, CompileResult, discover, shim
from evaluator.compile.commands import plain_words

Run = Callable[[str], "Ran"]

WORKERS = """
import json, os, socket, sys
import torch.utils.cpp_extension
from evaluator.compile import shim
from evaluator.worker import confine, sandbox  # all of it before the project is hidden
control = socket.socket(fileno=int(sys.argv[1]))
settings = sandbox.SandboxPlan(execute=tuple(json.loads(sys.argv[2])))

def work(channel, source):
    def ask(message):
        channel.sendall(json.dumps(message).encode() + b"\\n")
        data, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 1)
        return json.loads(data), (descriptors[0] if descriptors else None)
    shim.install(ask)
    space = {}
    try:
        exec(compile(source, "candidate.py", "exec"), space)
        answer = {"value": space["value"]}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}", "said": shim.explain(error)}
    channel.sendall(json.dumps({"op": "done", **answer}).encode() + b"\\n")

while True:
    data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
    if not data:
        break
    if os.fork() == 0:
        control.close()
        entered = sandbox.enter_namespaces(settings.layers)
        if os.fork() == 0:
            channel = socket.socket(fileno=descriptors[0])
            sandbox.isolate(settings, entered, {channel.fileno()})
            work(channel, data.decode())
            os._exit(0)
        os.close(descriptors[0])
        os.wait()
        os._exit(0)
    os.close(descriptors[0])
    os.wait()
"""
"""A small zygote: one import of torch for all tests, a fresh isolated process for each candidate."""

SMALL = """
from torch.utils.cpp_extension import load_inline
SOURCE = '''
#include <Python.h>
static PyObject* twice(PyObject*, PyObject* x) { return PyNumber_Add(x, x); }
static PyMethodDef methods[] = {{"twice", twice, METH_O, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "m", nullptr, -1, methods};
#define NAME2(a, b) a##b
#define NAME(a, b) NAME2(a, b)
PyMODINIT_FUNC NAME(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
'''
def build(**more):
    return load_inline("small", cpp_sources=SOURCE, no_implicit_headers=True, **more)
"""
"""A module without torch's headers: half a second instead of half a minute."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompilePool]:
    if not discover().cxx:
        pytest.skip("no C++ compiler on this machine")
    with CompilePool(CompileConfig(cache_dir=str(tmp_path_factory.mktemp("cache")))) as made:
        yield made


@pytest.fixture(scope="module")
def workers() -> Iterator[socket.socket]:
    tools = discover()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-c", WORKERS, str(theirs.fileno()), json.dumps(tools.execute("cpu"))],
        pass_fds=[theirs.fileno()], env={**os.environ, "PATH": tools.search_path(), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    theirs.close()
    yield ours
    ours.close()
    process.wait(30)


@dataclass(frozen=True)
class Ran:
    """What a candidate came to: its `value`, or its `error` and what a compiler `said`; and what was built for it."""

    value: Any = None
    error: str = ""
    said: str = ""
    built: tuple[CompileResult, ...] = ()


@pytest.fixture
def candidate(pool: CompilePool, workers: socket.socket) -> Callable[[str], Ran]:
    def run(source: str) -> Ran:
        ours, theirs = socket.socketpair()
        socket.send_fds(workers, [textwrap.dedent(source).encode()], [theirs.fileno()])
        theirs.close()
        built: list[CompileResult] = []
        with ours, ours.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if message.pop("op") == "done":
                    return Ran(built=tuple(built), **message)
                answer, descriptor, result = pool.serve(message)
                built.append(result)
                socket.send_fds(ours, [json.dumps(answer).encode()], [] if descriptor is None else [descriptor])
                if descriptor is not None:
                    os.close(descriptor)
        raise AssertionError("the worker ended without an answer")

    return run


def test_load_inline_at_module_level_is_served_by_the_pool(candidate: Run) -> None:
    ran = candidate(SMALL + "value = build().twice(21)\n")
    assert ran.value == 42, ran.error
    (result,) = ran.built
    assert "landlock" in result.isolation or result.cached


def test_the_same_call_twice_is_one_module_and_a_changed_one_another(candidate: Run) -> None:
    ran = candidate(SMALL + textwrap.dedent("""
        first, again = build(), build()
        other = build(extra_cflags=["-O1 -DX=1"])
        names = [m.__file__.split("/")[-1] for m in (first, other)]
        value = [first is again, first is other, *names, other.twice("ab")]
    """))  # fmt: skip
    assert ran.value == [True, False, "small.so", "small_v1.so", "abab"], ran.error
    assert len(ran.built) == 2


def test_a_first_call_in_a_thread_inside_a_method_works_too(candidate: Run) -> None:
    ran = candidate(SMALL + textwrap.dedent("""
        import threading
        class Model:
            def forward(self, x):
                self.kernel = getattr(self, "kernel", None) or build(extra_cflags=["-DIN_FORWARD"])
                return self.kernel.twice(x)
        box = []
        thread = threading.Thread(target=lambda: box.append(Model().forward(4)))
        thread.start(); thread.join()
        value = box[0]
    """))  # fmt: skip
    assert ran.value == 8, ran.error


def test_the_library_is_a_private_read_only_file(candidate: Run) -> None:
    ran = candidate(SMALL + textwrap.dedent("""
        import os, stat
        path = build().__file__
        value = [stat.S_IMODE(os.stat(path).st_mode), path.startswith(os.environ["TMPDIR"])]
    """))  # fmt: skip
    assert ran.value == [0o444, True], ran.error


def test_a_compile_error_is_raised_in_the_candidate_with_its_own_lines(candidate: Run) -> None:
    ran = candidate("""
        from torch.utils.cpp_extension import load_inline
        load_inline("bad", cpp_sources=["int fine;", "int f() { return missing; }"], no_implicit_headers=True)
    """)  # fmt: skip
    assert ran.error.startswith("CompileError: Error building extension 'bad'")
    assert "main.cpp:2:" in ran.said
    (result,) = ran.built
    assert (result.errors[0].file, result.errors[0].line) == ("main.cpp", 2)


def test_a_caught_error_is_still_known(candidate: Run) -> None:
    ran = candidate("""
        from torch.utils.cpp_extension import load_inline
        try:
            load_inline("bad", cpp_sources="int f() { return missing; }", no_implicit_headers=True)
        except RuntimeError:
            pass
        undefined_name
    """)  # fmt: skip
    assert ran.error.startswith("NameError")
    assert "missing" in ran.said


def test_load_takes_files_and_headers_that_the_candidate_wrote(candidate: Run) -> None:
    ran = candidate(SMALL + textwrap.dedent("""
        import os
        from torch.utils.cpp_extension import load
        os.makedirs("include/deep")
        open("include/deep/name.h", "w").write("#define ANSWER twice\\n")
        open("near.h", "w").write("#define METHOD METH_O\\n")
        text = SOURCE.replace("METH_O", "METHOD").replace('"twice"', '"again"')
        open("mine.cpp", "w").write('#include <deep/name.h>\\n#include "near.h"\\n' + text)
        value = load("mine", ["mine.cpp"], extra_include_paths=["include"]).again(5)
    """))  # fmt: skip
    assert ran.value == 10, ran.error


def test_what_cannot_be_built_here_is_said_at_once(candidate: Run) -> None:
    ran = candidate("""
        from torch.utils.cpp_extension import load
        load("m", ["absent.cpp"])
    """)  # fmt: skip
    assert ran.error == "CompileError: cannot read the source absent.cpp: No such file or directory"
    assert not ran.built


DIRECT = """
    import ctypes, subprocess
    open("k.cpp", "w").write('''
    #include <omp.h>
    extern "C" void twice(float* x, long n) {
        #pragma omp parallel for
        for (long i = 0; i < n; ++i) x[i] *= 2;
    }''')
    RUN
    import torch
    x = torch.ones(5)
    ctypes.CDLL("./k.so").twice(ctypes.c_void_p(x.data_ptr()), ctypes.c_long(5))
    value = x.tolist()
"""


@pytest.mark.parametrize(
    "run",
    [
        'subprocess.run(["g++", "-march=native", "-fopenmp", "-shared", "-fPIC", "k.cpp", "-ok.so"], check=True)',
        'subprocess.check_call("g++ -O3 -fopenmp -shared -fPIC -o k.so k.cpp", shell=True)',
        'import os; assert os.system("c++ -O3 -fopenmp -shared -fPIC -o k.so k.cpp") == 0',
        'subprocess.check_output(["gcc", "-fopenmp", "-shared", "-fPIC", "k.cpp", "-o", "k.so"], stderr=-2)',
    ],
)
def test_a_candidate_may_run_the_system_compiler_itself(candidate: Run, run: str) -> None:
    ran = candidate(DIRECT.replace("RUN", run))
    assert ran.value == [2.0] * 5, ran.error


@pytest.mark.parametrize("program", ["/bin/sh", "/bin/bash", sys.executable, "/usr/bin/env", "/bin/ls", "./own"])
def test_nothing_but_the_toolchain_may_be_executed(candidate: Run, program: str) -> None:
    ran = candidate(f"""
        import os, shutil, subprocess
        shutil.copy("/bin/true", "own"); os.chmod("own", 0o755)
        try:
            subprocess.run([{program!r}, "-c", "true"])
            value = "ran"
        except (PermissionError, FileNotFoundError) as error:
            value = "PermissionError" if isinstance(error, PermissionError) else "FileNotFoundError"
    """)  # fmt: skip
    assert ran.value in ("PermissionError", "FileNotFoundError"), ran.error


def test_a_refused_program_is_also_a_failed_one(candidate: Run) -> None:
    ran = candidate("""
        import subprocess, sys
        value = []
        for kind in (PermissionError, subprocess.CalledProcessError, OSError):
            try:
                subprocess.run([sys.executable, "-c", "pass"], check=True)
            except kind as error:
                value.append([getattr(error, "returncode", None), "Permission denied" in str(error)])
    """)  # fmt: skip
    assert ran.value == [[126, True]] * 3, ran.error


def test_a_shell_line_that_needs_a_shell_is_refused(candidate: Run) -> None:
    ran = candidate("""
        import os
        value = [os.system("cc --version | cat") != 0, os.system("no-such-compiler x") != 0]
    """)  # fmt: skip
    assert ran.value == [True, True], ran.error


@pytest.mark.parametrize(
    "run",
    [
        'subprocess.run(["g++", "-shared", "k.cpp"], check=True)',
        'subprocess.run(["g++", "-shared", "k.cpp"], check=True, capture_output=True)',
        'subprocess.run("g++ -shared k.cpp -o k.so", shell=True); ctypes.CDLL("./k.so")',
    ],
)
def test_what_a_directly_run_compiler_said_is_kept(candidate: Run, run: str) -> None:
    ran = candidate(f"""
        import ctypes, subprocess
        open("k.cpp", "w").write("int f() {{ return missing; }}")
        {run}
    """)  # fmt: skip
    assert ran.error
    assert "k.cpp:1:18: error: " in ran.said
    assert "missing" in ran.said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("g++ -O2 'a b.cpp'", ["g++", "-O2", "a b.cpp"]),
        ("g++ a.cpp && ./a", None),
        ("X=1 g++ a.cpp", None),
        ("g++ $(cat x)", None),
        ("g++ *.cpp", None),
        ("", None),
        ("g++ 'open", None),
    ],
)
def test_only_plain_command_lines_are_read(line: str, words: list[str] | None) -> None:
    assert plain_words(line) == words


def test_bindings_quote_what_torch_would_break_on() -> None:
    message = shim._inline_request("n", "int f();", functions={"f": 'says "hi"'})
    assert message["sources"][0]["text"].splitlines() == [
        "int f();",
        "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {",
        'm.def("f", torch::wrap_pybind_function(f), "says \\"hi\\"");',
        "}",
    ]


@pytest.mark.slow
def test_torchs_headers_build_and_bind(candidate: Run) -> None:
    ran = candidate("""
        import torch
        from torch.utils.cpp_extension import load_inline
        source = "torch::Tensor twice(torch::Tensor x) { return x + x; }"
        kernel = load_inline(name="k", cpp_sources=source, functions=["twice"], extra_cflags=["-O2"], verbose=True)
        value = kernel.twice(torch.ones(3)).tolist()
    """)  # fmt: skip
    assert ran.value == [2.0] * 3, ran.error


@pytest.mark.slow
def test_a_precompiled_header_is_made_after_some_builds_and_used(
    workers: socket.socket, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("headers")
    text = "torch::Tensor twice(torch::Tensor x) { return x + x; }\n"
    with CompilePool(CompileConfig(cache_dir=str(folder), precompile_after=2)) as pool:
        for name in ("first", "second"):
            message = shim._inline_request(name, text, functions=["twice"])
            assert pool.serve(message)[2].ok
        headers = list(folder.glob("headers/*/torch/extension.h.gch"))
        assert len(headers) == 1
        plain = pool.serve(shim._inline_request("third", text, functions=["twice"], extra_cflags=["-DOTHER"]))[2]
        quick = pool.serve(shim._inline_request("third", text, functions=["twice"]))[2]
    assert quick.ok
    assert quick.seconds < 0.8 * plain.seconds
