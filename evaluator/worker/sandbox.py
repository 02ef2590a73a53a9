"""Namespaces and the private file system of a worker.

Invariants: every layer that is on is named in the record, in the order of `LAYERS`; a layer that the machine refuses is
left out, never faked; without any layer an untrusted candidate is not run (`sandbox_unavailable`) unless the
configuration says so by name. After `isolate` the process sees an empty private folder as its working directory, no
descriptors but those named, and a neutral command line.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import site
import sys
import tempfile
from dataclasses import dataclass
from functools import cache

from evaluator.worker import syscalls

LAYERS = ("user", "mount", "net", "ipc", "pid", "landlock", "seccomp")

_NAMESPACES = (
    ("user", syscalls.CLONE_NEWUSER),
    ("mount", syscalls.CLONE_NEWNS),
    ("net", syscalls.CLONE_NEWNET),
    ("ipc", syscalls.CLONE_NEWIPC),
    ("pid", syscalls.CLONE_NEWPID),
)
_SCRATCH_HOSTS = ("/tmp", "/var/tmp", "/mnt", "/media")
"""Folders that every Linux has and nothing needs: the private tmpfs is mounted over the first that hides nothing."""


@dataclass(frozen=True)
class SandboxPlan:
    """What a worker is allowed; made by the judge, carried out by the child itself."""

    read: tuple[str, ...] = ()
    """Trees to read beside the interpreter's own."""
    execute: tuple[str, ...] = ()
    """Trees of the toolchain."""
    devices: tuple[str, ...] = ()
    accelerator: bool = False
    """Whether the worker uses an accelerator, whose driver wants all of /dev, /sys and its own entries of /proc."""
    cores: tuple[int, ...] = ()
    """Cores that the worker and all its threads are held on; empty for all."""
    scratch_mib: int = 512
    layers: tuple[str, ...] = LAYERS
    """Layers to try; tests and hosts without them switch some off."""
    fallback_scratch: str = ""
    """A folder that does not exist yet, made on machines without mount namespaces; the judge removes it."""


def enter_namespaces(wanted: tuple[str, ...]) -> list[str]:
    """Moves into as many of the wanted namespaces as the machine allows; the pid one is for the next child.

    All at once first; where that is refused, one after the other, so that a machine that forbids one keeps the rest.
    """
    flags = [(name, flag) for name, flag in _NAMESPACES if name in wanted]
    uid, gid = os.geteuid(), os.getegid()
    entered: list[str] = []
    combined = 0
    for _, flag in flags:
        combined |= flag
    try:
        if combined:
            syscalls.unshare(combined)
        entered = [name for name, _ in flags]
    except OSError:
        for name, flag in flags:
            with contextlib.suppress(OSError):
                syscalls.unshare(flag)
                entered.append(name)
    if "user" in entered:
        _map_ids(uid, gid)
    return entered


def _map_ids(uid: int, gid: int) -> None:
    for name, text in (("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"), ("uid_map", f"{uid} {uid} 1")):
        with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
            file.write(text)


_PROJECT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


@cache
def interpreter_trees() -> tuple[str, ...]:
    """Folders that Python and its compiled libraries are read from.

    Those of the import path are among them, but for the project and every folder that holds it or the user's home,
    such as the `/` that the zygote is started in.
    """
    trees = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.__file__), *site.getsitepackages()}
    trees |= {os.path.dirname(os.path.realpath(sys.executable))}
    trees |= {entry for entry in sys.path if os.path.isabs(entry) and not holds_private(entry)}
    return tuple(sorted(os.path.realpath(tree) for tree in trees if os.path.isdir(tree)))


def holds_private(folder: str) -> bool:
    """Whether the project or the user's home lies in the folder, so that no worker may read all of it."""
    private = (_PROJECT, os.path.realpath(os.path.expanduser("~")))
    inside = os.path.join(os.path.realpath(folder), "")
    return any(os.path.join(place, "").startswith(inside) for place in private)


def import_path() -> str:
    """PYTHONPATH for a process of the project: its folder, then whatever this process finds installed packages by.

    Those are the entries of PYTHONPATH and the folders that packages were installed to beside the interpreter's own.
    Other entries of the import path are left out: a script's folder, which candidates could read, and what a package
    keeps for itself within its own folder (setuptools puts older packages of others on the path when it is imported).
    """
    given = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    own = {os.path.realpath(folder) for folder in site.getsitepackages()}
    installed = [e for e in sys.path if os.path.isabs(e) and os.path.realpath(e) not in own and _has_packages(e)]
    return os.pathsep.join(dict.fromkeys([_PROJECT, *given, *installed]))


def _has_packages(folder: str) -> bool:
    if os.path.exists(os.path.join(os.path.dirname(folder), "__init__.py")):
        return False
    with contextlib.suppress(OSError):
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    return False


SYSTEM_TREES = (
    "/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/localtime",
    "/etc/alternatives", "/etc/passwd", "/etc/nsswitch.conf", "/sys/devices/system", "/sys/fs/cgroup",
)  # fmt: skip
ACCELERATOR_TREES = ("/sys", "/proc/driver", "/proc/devices", "/proc/modules", "/proc/meminfo", "/proc/cpuinfo")
"""What the CUDA driver reads beside what every worker may."""
PLAIN_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def private_files(plan: SandboxPlan, entered: list[str]) -> str:
    """Makes the scratch folder, and a private /dev/shm and /proc where mounts are allowed; returns the folder."""
    if "mount" not in entered:
        return _plain_scratch(plan)
    try:
        syscalls.mount("none", "/", "none", syscalls.MS_REC | syscalls.MS_PRIVATE)
        needed = (*interpreter_trees(), *plan.read, *plan.execute)
        host = next(place for place in _SCRATCH_HOSTS if os.path.isdir(place) and not _holds(place, needed))
        _tmpfs(host, plan.scratch_mib)
    except (OSError, StopIteration):
        entered.remove("mount")
        return _plain_scratch(plan)
    for hidden in ("/dev/shm", "/run"):
        with contextlib.suppress(OSError):
            _tmpfs(hidden, 1)
    if "pid" in entered:
        with contextlib.suppress(OSError):
            syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    return host


def _holds(place: str, trees: tuple[str, ...]) -> bool:
    return any(os.path.realpath(tree).startswith(place + os.sep) for tree in trees)


def _tmpfs(target: str, size_mib: int) -> None:
    syscalls.mount("tmpfs", target, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, f"size={size_mib}m,mode=0700")


def _plain_scratch(plan: SandboxPlan) -> str:
    if not plan.fallback_scratch:
        raise OSError("no mount namespace and no fallback folder for the worker's files")
    os.makedirs(plan.fallback_scratch, mode=0o700)
    return plan.fallback_scratch


def isolate(plan: SandboxPlan, entered: list[str], keep: set[int]) -> list[str]:
    """Carries the plan out in a fresh single-threaded child; returns the layers that are on.

    Raises OSError where not even a private folder can be made.
    """
    if plan.cores:
        os.sched_setaffinity(0, plan.cores)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    syscalls.close_descriptors({0, 1, 2} | keep)
    scratch = private_files(plan, entered)
    _private_environment(scratch)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    layers = list(entered)
    layers += _confine(plan, scratch)
    _neutral_command_line()
    return [layer for layer in LAYERS if layer in layers]


def _confine(plan: SandboxPlan, scratch: str) -> list[str]:
    from evaluator.worker import confine

    layers = []
    if "landlock" in plan.layers and confine.landlock_available():
        own_proc = "/proc" if os.getpid() == 1 else "/proc/self"
        read = (*interpreter_trees(), *SYSTEM_TREES, *plan.read, own_proc)
        own = [scratch]
        if os.path.ismount("/dev/shm"):
            own.append("/dev/shm")
        if plan.accelerator:
            confine.restrict_files(
                read=(*read, *ACCELERATOR_TREES), execute=plan.execute, own=own, devices=PLAIN_DEVICES,
                notes=(own_proc,), whole=("/dev",),
            )  # fmt: skip
        else:
            confine.restrict_files(read=read, execute=plan.execute, own=own, devices=(*PLAIN_DEVICES, *plan.devices))
        layers.append("landlock")
    if "seccomp" in plan.layers and confine.seccomp_available():
        confine.filter_calls(accelerator=plan.accelerator)
        layers.append("seccomp")
    return layers


def _private_environment(scratch: str) -> None:
    work = os.path.join(scratch, "work")
    os.makedirs(work, mode=0o700, exist_ok=True)
    os.chdir(work)
    os.environ.update(HOME=scratch, TMPDIR=scratch)
    tempfile.tempdir = None  # the zygote may have asked for it already
    for name, folder in (
        ("TORCH_EXTENSIONS_DIR", "extensions"), ("TRITON_CACHE_DIR", "triton"), ("XDG_CACHE_HOME", "cache"),
    ):  # fmt: skip
        os.environ[name] = os.path.join(scratch, folder)


def _neutral_command_line() -> None:
    sys.argv[:] = ["python"]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = ["python"]
    with open("/proc/self/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: fields 48 and 49 of proc(5)
    if 0 < end - start < 1 << 16:
        text = b"python"[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))
    syscalls.prctl(syscalls.PR_SET_NAME, b"python")
