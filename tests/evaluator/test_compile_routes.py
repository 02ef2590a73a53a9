"""From requests to commands, and what a compiler said: pure parts of the compile pool."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluator.compile import CompileRequest, Toolchain, diagnostics
from evaluator.compile.request import BadRequest, CompileResult, SourceFile
from evaluator.compile.routes import RefusedRequest, header_flags, plan_build, split_flags

TOOLS = Toolchain(
    cc="/bin/cc", cxx="/bin/c++", nvcc="/cuda/bin/nvcc", cuda_home="/cuda", nvrtc="", triton=False, torch_root="/torch",
    torch_version="2.13.0", torch_cuda=False, torch_std="c++20", python_include="/py", host_programs=("/bin/c++",),
    cuda_programs=("/cuda/bin",), read=("/torch",), fingerprint="f",
)  # fmt: skip


def _request(name: str = "k.cpp", text: str = "int x;", **fields: object) -> CompileRequest:
    return CompileRequest.model_validate({"name": "k", "sources": [{"name": name, "text": text}], **fields})


def test_an_extension_is_built_as_torch_builds_it() -> None:
    plan = plan_build(_request("main.cpp", cflags=("-O3 -march=native",)), TOOLS)
    (command,) = plan.objects
    for word in ("-DTORCH_EXTENSION_NAME=k", "-fPIC", "-std=c++20", "-O3", "-march=native", "/torch/include", "/py"):
        assert word in command
    assert command[command.index("-include") + 1] == "torch/extension.h"
    assert "-ltorch_python" in plan.link
    assert plan.output == "k.so"
    assert plan.lane == "slow"


def test_a_plain_source_sees_no_torch_and_takes_the_quick_lane() -> None:
    plan = plan_build(_request(torch=False, cflags=("-fopenmp",)), TOOLS)
    assert not any("torch" in word for word in (*plan.objects[0], *plan.link))
    assert "-fopenmp" in plan.link
    assert plan.lane == "quick"
    assert plan.execute == TOOLS.host_programs


def test_cuda_takes_the_configured_architecture_unless_its_flags_name_one() -> None:
    configured = plan_build(_request("k.cu", torch=False), TOOLS, arch="9.0a")
    assert "-gencode=arch=compute_90a,code=sm_90a" in configured.objects[0]
    own = plan_build(_request("k.cu", torch=False, cuda_cflags=("-arch=sm_80",)), TOOLS, arch="9.0a")
    assert not any("90a" in word for word in own.objects[0])
    assert "/cuda/bin" in own.execute


@pytest.mark.parametrize("flag", ["-o x", "-fplugin=./evil.so", "@more", "-B.", "-wrapper gdb", "--run", "-E", "'open"])
def test_flags_that_leave_the_job_are_refused(flag: str) -> None:
    with pytest.raises(RefusedRequest):
        plan_build(_request(cflags=(flag,)), TOOLS)


def test_what_is_missing_is_said_in_the_candidates_terms() -> None:
    with pytest.raises(RefusedRequest, match="no nvcc"):
        plan_build(_request("k.cu"), dataclasses.replace(TOOLS, nvcc=""))
    with pytest.raises(RefusedRequest, match="must end in"):
        plan_build(_request("k.rs"), TOOLS)


def test_the_key_covers_text_flags_architecture_and_toolchain() -> None:
    base = _request("k.cu", torch=False)
    keys = {
        plan_build(base, TOOLS, arch="9.0").key("f"),
        plan_build(base, TOOLS, arch="8.0").key("f"),
        plan_build(base, TOOLS, arch="9.0").key("g"),
        plan_build(_request("k.cu", "int y;", torch=False), TOOLS, arch="9.0").key("f"),
        plan_build(_request("k.cu", torch=False, cuda_cflags=("-O1",)), TOOLS, arch="9.0").key("f"),
    }
    assert len(keys) == 5
    assert plan_build(_request("k.cu", torch=False), TOOLS, arch="9.0").key("f") in keys


def test_a_precompiled_header_serves_only_what_includes_it_first() -> None:
    one = header_flags(_request("main.cpp", cflags=("-O3",)), TOOLS)
    other = header_flags(_request("main.cpp", cflags=("-O3",)).model_copy(update={"name": "other"}), TOOLS)
    assert one is not None
    assert one == other
    assert header_flags(_request("main.cpp", implicit_headers=False), TOOLS) is None
    assert header_flags(_request("k.cu"), TOOLS) is None


@pytest.mark.parametrize("name", ["../x.cpp", "/etc/x.cpp", "a//b.h", "a/./b.h", "", "a\\b.h", "x\n.cpp"])
def test_a_file_of_a_request_stays_in_the_jobs_folder(name: str) -> None:
    with pytest.raises(BadRequest):
        CompileRequest.from_wire({"op": "compile", "name": "k", "sources": [{"name": name, "text": ""}]})


def test_a_request_survives_the_wire_and_nothing_else_is_read() -> None:
    request = _request("main.cpp", cflags=("-O2",), headers=[{"name": "a/b.h", "text": "//"}])
    assert CompileRequest.from_wire(request.to_wire()) == request
    with pytest.raises(BadRequest):
        CompileRequest.from_wire({**request.to_wire(), "more": 1})
    with pytest.raises(BadRequest, match="two files"):
        CompileRequest.from_wire({**request.to_wire(), "headers": [{"name": "main.cpp", "text": ""}]})


@given(st.lists(st.text(alphabet="abc-=DO1. ", max_size=8), max_size=5))
def test_splitting_flags_is_splitting_words(flags: list[str]) -> None:
    try:
        words = split_flags(tuple(flags))
    except RefusedRequest:
        return
    assert list(words) == " ".join(flags).split()


@pytest.mark.parametrize(
    ("text", "file", "line", "message"),
    [
        ("k.cpp:3:5: error: 'y' was not declared", "k.cpp", 3, "'y' was not declared"),
        ("x.h:1:10: fatal error: no.h: No such file or directory", "x.h", 1, "no.h: No such file or directory"),
        ('cuda.cu(12): error: identifier "y" is undefined', "cuda.cu", 12, 'identifier "y" is undefined'),
        ("cuda.cu(7): error #20: bad", "cuda.cu", 7, "bad"),
        ("ptxas /tmp/a.ptx, line 40; error   : Illegal", "/tmp/a.ptx", 40, "Illegal"),
        ("ptxas fatal   : Unresolved extern function 'g'", "", 0, "Unresolved extern function 'g'"),
        ("/usr/bin/ld: k.cpp:(.text+0xe): undefined reference to `g'", "k.cpp", 0, "undefined reference to `g'"),
        ("/usr/bin/ld: cannot find -lnone: No such file", "", 0, "cannot find -lnone: No such file"),
    ],
)
def test_first_errors_of_each_tool(text: str, file: str, line: int, message: str) -> None:
    (error,) = diagnostics.first_errors(f"In file included from main.cpp:2:\n{text}\nmore\n{text}\n")
    assert (error.file, error.line, error.message) == (file, line, message)


def test_warnings_are_no_errors() -> None:
    assert diagnostics.first_errors("k.cpp:3:5: warning: unused\n/usr/bin/ld: warning: missing .note\n") == ()


@given(st.text(max_size=3000), st.integers(min_value=100, max_value=500))
def test_cut_text_keeps_to_its_size_and_starts_at_the_error(noise: str, limit: int) -> None:
    assert len(diagnostics.cut(noise, limit)) <= limit
    error = "k.cpp:3:5: error: here"
    assert diagnostics.cut(f"note: before\n{error}\n{noise}", limit).startswith(error)


def test_a_result_keeps_the_judges_paths_to_itself(tmp_path: object) -> None:
    result = CompileResult.model_validate({"name": "k", "library": str(tmp_path), "key": "k"})
    assert str(tmp_path) not in str(result.to_answer())
    assert SourceFile(name="a.h", text="").name == "a.h"
