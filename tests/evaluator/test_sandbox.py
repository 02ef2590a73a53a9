"""What a confined worker can and cannot do, seen from inside: each probe is a candidate's module."""

from __future__ import annotations

import os
import socket
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluator.worker import schema, wire
from evaluator.worker.process import ROOT, Child, Zygote
from evaluator.worker.sandbox import LAYERS, SandboxPlan


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    running = Zygote()
    running.start()
    yield running
    running.close()


def ask(child: Child, message: wire.Message, source: str = "") -> wire.Message:
    descriptors = []
    if source:
        descriptors = [os.memfd_create("source")]
        os.write(descriptors[0], textwrap.dedent(source).encode())
    wire.send(child.channel, message, descriptors)
    for number in descriptors:
        os.close(number)
    return wire.receive(child.channel, 20.0)


def start(zygote: Zygote, plan: SandboxPlan) -> tuple[Child, list[str]]:
    child = zygote.spawn_worker(plan)
    ready = wire.receive(child.channel, 10.0)
    assert ready["op"] == "ready", ready
    return child, ready["layers"]


def probe(zygote: Zygote, source: str, plan: SandboxPlan | None = None, *, sealed: bool = False) -> None:
    """Runs assertions inside a worker; fails with the worker's own text."""
    child, _ = start(zygote, plan or SandboxPlan())
    try:
        if sealed:
            assert ask(child, {"op": "seal", "filter": True}) == {"op": "sealed"}
        answer = ask(child, {"op": "load", "class_name": "ModelNew"}, DENIED + textwrap.dedent(source))
        assert answer == {"op": "loaded", "defined": False}, answer
    finally:
        child.kill()


DENIED = """
import os, sys
def denied(call, *arguments):
    try:
        call(*arguments)
    except (OSError, ImportError):
        return True
    return False
"""


def test_all_layers_are_on_where_the_machine_has_them(zygote: Zygote) -> None:
    child, layers = start(zygote, SandboxPlan())
    child.kill()
    assert {"landlock", "seccomp"} <= set(layers)
    assert set(layers) <= set(LAYERS)


def test_home_project_and_tests_are_out_of_reach(zygote: Zygote) -> None:
    probe(zygote, f"""
        assert denied(os.listdir, {str(ROOT)!r})
        assert denied(open, {str(Path(__file__).resolve())!r})
        assert denied(os.listdir, {str(Path.home())!r}) or {str(Path.home())!r} in sys.prefix
        assert denied(os.listdir, "/")
    """)  # fmt: skip


def test_the_project_cannot_be_imported(zygote: Zygote) -> None:
    probe(zygote, """
        assert denied(__import__, "evaluator")
        assert denied(__import__, "evaluator.worker.wire")
        assert denied(__import__, "tasks")
        assert not [name for name in sys.modules if name.split(".")[0] in ("evaluator", "tasks")]
        assert not any(os.path.exists(os.path.join(entry, "evaluator")) for entry in sys.path)
        assert "" not in sys.path and "/" not in sys.path
    """)  # fmt: skip


def test_the_working_folder_is_private_and_empty_and_the_command_line_neutral(zygote: Zygote) -> None:
    source = """
        assert os.listdir(".") == ["candidate.py"], os.listdir(".")
        open("mine", "w").write("x")
        import tempfile
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"x")
        assert sys.argv == ["python"]
        assert "kontrast" not in open("/proc/self/cmdline").read()
        assert "evaluator" not in open("/proc/self/cmdline").read()
        assert "PYTHONPATH" not in os.environ
    """
    probe(zygote, source)
    probe(zygote, source)


def test_no_descriptor_is_inherited_but_the_channel(zygote: Zygote) -> None:
    probe(zygote, """
        import stat
        kinds = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                kinds[int(name)] = os.fstat(int(name)).st_mode
            except OSError:
                pass
        others = [number for number in kinds if number > 2]
        assert sum(stat.S_ISSOCK(kinds[number]) for number in others) == 1, kinds
        assert not any(stat.S_ISFIFO(kinds[number]) for number in others), kinds
        assert all(os.path.samestat(os.fstat(number), os.stat("/dev/null")) for number in (0, 1, 2))
    """)  # fmt: skip


def test_no_network_and_no_sockets(zygote: Zygote) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        probe(zygote, f"""
            import socket
            assert denied(socket.create_connection, ("127.0.0.1", {port}), 1.0)
            assert denied(socket.socket, socket.AF_UNIX)
        """)  # fmt: skip


def test_an_accelerators_worker_listens_on_a_unix_socket_that_nobody_can_connect_to(
    zygote: Zygote, tmp_path: Path
) -> None:
    """The driver needs to; the path lies outside what the private file system hides."""
    folder = Path.cwd() / f".{tmp_path.name}-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        try:
            folder.mkdir()
            server.bind(str(folder / "s"))
            server.listen()
            probe(zygote, f"""
                import socket
                made, other = (socket.socket(socket.AF_UNIX) for _ in range(2))
                made.bind("\\0here")
                made.listen()
                assert denied(made.accept)
                assert denied(other.bind, {str(folder / "t")!r}) and denied(other.bind, "s")
                assert denied(other.connect, {str(folder / "s")!r}) and denied(other.connect, "\\0here")
                assert denied(socket.socket, socket.AF_INET) and denied(socket.socket, socket.AF_NETLINK)
                socket.socketpair()
            """, SandboxPlan(accelerator=True))  # fmt: skip
        finally:
            (folder / "s").unlink(missing_ok=True)
            folder.rmdir()


def test_no_signals_sessions_or_namespaces(zygote: Zygote) -> None:
    probe(zygote, f"""
        import ctypes, signal
        assert denied(os.kill, {os.getpid()}, 0)
        assert denied(os.kill, 0, 0) and denied(os.kill, -1, 0)
        assert denied(os.setsid) and denied(os.setpgid, 0, 0)
        libc = ctypes.CDLL(None)
        for call in (lambda: libc.unshare(0x10000000), lambda: libc.mount(b"x", b"/tmp", b"tmpfs", 0, None),
                     lambda: libc.ptrace(16, 1, 0, 0), lambda: libc.syscall(425, 1, 0)):
            assert call() == -1
        assert denied(os.sched_setaffinity, 0, [0])
        os.kill(os.getpid(), 0)
    """)  # fmt: skip


def test_no_program_is_executed_but_the_toolchain(zygote: Zygote) -> None:
    probe(zygote, """
        import subprocess
        assert denied(subprocess.run, [sys.executable, "-c", "pass"])
        assert denied(subprocess.run, ["/bin/ls"])
        open("script", "w").write("#!/bin/true")
        os.chmod("script", 0o755)
        assert denied(subprocess.run, ["./script"])
    """)  # fmt: skip
    tool = os.path.realpath("/bin/true")
    probe(zygote, f"""
        import subprocess
        assert subprocess.run([{tool!r}]).returncode == 0
    """, SandboxPlan(execute=(tool, "/lib64/ld-linux-x86-64.so.2")))  # fmt: skip


def test_the_seal_forbids_processes_and_keeps_threads(zygote: Zygote) -> None:
    tool = os.path.realpath("/bin/true")
    probe(zygote, f"""
        import ctypes, subprocess, threading
        assert denied(os.fork) and denied(subprocess.run, [{tool!r}])
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.syscall(56, 17, 0, 0, 0, 0) == -1      # clone without CLONE_THREAD
        assert libc.syscall(435, 0, 0) == -1 and ctypes.get_errno() == 38     # clone3: as if it did not exist
        done = []
        thread = threading.Thread(target=lambda: done.append(denied(os.fork)))
        thread.start(); thread.join()
        assert done == [True]
    """, SandboxPlan(execute=(tool,)), sealed=True)  # fmt: skip


def test_threads_started_before_the_seal_are_sealed_too(zygote: Zygote) -> None:
    child, _ = start(zygote, SandboxPlan())
    early = DENIED + textwrap.dedent("""
        import builtins, threading
        builtins.go, builtins.done = threading.Event(), []
        threading.Thread(target=lambda: (go.wait(), done.append(denied(os.fork))), daemon=True).start()
    """)
    late = """
        import time
        go.set()
        time.sleep(0.1)
        assert done == [True], done
    """
    try:
        assert ask(child, {"op": "load", "class_name": "ModelNew"}, early)["op"] == "loaded"
        assert ask(child, {"op": "seal", "filter": True}) == {"op": "sealed"}
        answer = ask(child, {"op": "load", "class_name": "ModelNew"}, late)
        assert answer["op"] == "loaded", answer
    finally:
        child.kill()


def test_only_the_worker_itself_is_visible_where_pid_namespaces_work(zygote: Zygote) -> None:
    child, layers = start(zygote, SandboxPlan())
    child.kill()
    if "pid" not in layers or "mount" not in layers:
        pytest.skip("no pid namespace on this machine")
    probe(zygote, """
        assert os.getpid() == 1
        assert [name for name in os.listdir("/proc") if name.isdigit()] == ["1"]
    """)  # fmt: skip


def test_without_namespaces_landlock_and_seccomp_still_hold(zygote: Zygote, tmp_path: Path) -> None:
    plan = SandboxPlan(layers=("landlock", "seccomp"), fallback_scratch=str(tmp_path / "scratch"))
    child, layers = start(zygote, plan)
    child.kill()
    assert layers == ["landlock", "seccomp"]
    secret = tmp_path.parent / "secret"
    secret.write_text("x")
    probe(zygote, f"""
        assert denied(open, {str(secret)!r})
        assert denied(os.listdir, "/proc")
        assert denied(os.kill, {os.getpid()}, 0)
        open("mine", "w").write("x")
    """, plan)  # fmt: skip


def test_a_stopped_worker_does_nothing_and_goes_on_when_resumed(zygote: Zygote) -> None:
    child, _ = start(zygote, SandboxPlan())
    try:
        source = """
            import threading
            def spin():
                while True: pass
            for _ in range(2): threading.Thread(target=spin, daemon=True).start()
        """
        ask(child, {"op": "load", "class_name": "ModelNew"}, source)
        child.stop()
        assert child.stopped()
        before = child.cpu_ns()
        time.sleep(0.05)
        assert child.cpu_ns() == before
        child.resume()
        time.sleep(0.05)
        assert child.cpu_ns() > before
        assert child.threads() >= 3
    finally:
        child.kill()


def test_kill_leaves_nothing_and_is_safe_to_repeat(zygote: Zygote) -> None:
    child, _ = start(zygote, SandboxPlan())
    child.stop()
    child.kill()
    child.kill()
    deadline = time.monotonic() + 2.0
    while os.path.exists(f"/proc/{child.pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{child.pid}")


def test_the_zygote_forks_from_a_single_thread_only(zygote: Zygote) -> None:
    assert os.listdir(f"/proc/{zygote.pid}/task") == [str(zygote.pid)]
    children = [zygote.spawn_worker(SandboxPlan()) for _ in range(3)]
    assert os.listdir(f"/proc/{zygote.pid}/task") == [str(zygote.pid)]
    for child in children:
        child.kill()


def test_answers_come_from_the_schema_also_when_the_candidate_patched_json(zygote: Zygote) -> None:
    child, _ = start(zygote, SandboxPlan())
    try:
        source = """
            import json
            json.dumps = lambda *a, **k: '{"op": "accepted"}'
            class ModelNew: pass
        """
        answer = ask(child, {"op": "load", "class_name": "ModelNew"}, source)
        assert schema.parse(answer, schema.Loaded).defined
    finally:
        child.kill()


def test_the_judge_may_be_called_from_any_thread(zygote: Zygote) -> None:
    """Parent-death signals fire when the thread that forked ends: a worker must not die with the caller's thread."""
    children: list[Child] = []
    thread = threading.Thread(target=lambda: children.append(start(zygote, SandboxPlan())[0]))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert ask(children[0], {"op": "inspect"})["op"] == "inspected"
    children[0].kill()
