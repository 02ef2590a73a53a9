"""Probe: which denied system calls CUDA cannot start without, on this driver.

    python scripts/probe_cuda_seccomp.py OUT.jsonl       # on a machine with one NVIDIA GPU, about 20 s

A child is forked for each call of the evaluator's first filter, denies that call alone, makes a context and computes;
then one child denies all but those that were needed. A call on which that depends only in some uses (a socket of one
family, an affinity of one's own) is tried by those uses. One JSON line a child; prints what is needed.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from seccompy import CmpOp, Filter

from evaluator.worker import confine

AT_ONCE = 8
NAMESPACES = [1 << bit for bit in range(32) if confine._CLONE_NEW_NAMESPACE & 1 << bit]
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16


def denying(names: list[str], number: int = errno.EPERM) -> Callable[[], None]:
    def apply() -> None:
        filter_ = Filter()
        for name in names:
            confine._deny(filter_, name, number)
        filter_.load()

    return apply


def denying_where(name: str, args: list[tuple[int, ...]]) -> Callable[[], None]:
    def apply() -> None:
        filter_ = Filter()
        confine._deny(filter_, name, errno.EPERM, args)
        filter_.load()

    return apply


def denying_clone(flag: int) -> Callable[[], None]:
    return denying_where("clone", [(0, CmpOp.MASKED_EQ, flag, flag)])


def clone3_missing() -> None:
    filter_ = Filter()
    confine._deny_clone3(filter_)
    filter_.load()


def compute() -> str:
    """Empty when CUDA works, else what was said."""
    try:
        torch.cuda.init()
        x = torch.ones(1000, device="cuda")
        assert float((x + 1).sum()) == 2000.0
        torch.cuda.synchronize()
    except BaseException as error:  # noqa: BLE001  whatever it is, it is the result
        return f"{type(error).__name__}: {error}"[:300]
    return ""


Begun = tuple[str, int, int, float]


def begin(label: str, apply: Callable[[], None]) -> Begun:
    """Forks a child that applies a filter and computes."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            apply()
            said = compute()
        except BaseException as error:  # noqa: BLE001
            said = f"{type(error).__name__}: {error}"
        os.write(write, (said or "ok").encode())
        os._exit(0)
    os.close(write)
    return label, pid, read, time.monotonic()


def end(label: str, pid: int, read: int, begun: float) -> dict[str, object]:
    """What the child came to."""
    with open(read, "rb") as file:
        said = file.read().decode() or "died"
    os.waitpid(pid, 0)
    return {"denied": label, "works": said == "ok", "said": said, "seconds": round(time.monotonic() - begun, 2)}


def batched(items: Iterable[tuple[str, Callable[[], None]]]) -> Iterator[list[tuple[str, Callable[[], None]]]]:
    left = list(items)
    while left:
        yield left[:AT_ONCE]
        left = left[AT_ONCE:]


def whole() -> None:
    confine._calls(os.getpid(), True).load()


def main(out: Path) -> None:
    """Tries every call, then all that are not needed together; writes the rows."""
    names = [*confine._NEVER, "socket", "bind", "listen"]
    trials: dict[str, Callable[[], None]] = {"nothing": lambda: None, "the whole filter": whole}
    trials |= {name: denying([name]) for name in names}
    for name in ("kill", "tgkill"):
        trials[f"{name} of others"] = lambda name=name: denying_where(name, [(0, CmpOp.NE, os.getpid())])()
    for family in (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK):
        trials[f"socket of family {family}"] = denying_where("socket", [(0, CmpOp.EQ, family)])
    trials["sockets connected or accepted"] = denying(["connect", "accept", "accept4"])
    trials["sockets but of family 1"] = denying_where("socket", [(0, CmpOp.NE, AF_UNIX)])
    trials["clone3"] = clone3_missing
    trials |= {f"clone with {flag:#x}": denying_clone(flag) for flag in NAMESPACES}
    rows = []
    for some in batched(trials.items()):
        begun = [begin(label, apply) for label, apply in some]
        rows += [end(*what) for what in begun]
    needed = [str(row["denied"]) for row in rows if not row["works"] and row["denied"] in names]
    rest = [name for name in names if name not in needed]
    rows.append(end(*begin("all but those needed", denying(rest))))
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        if not row["works"]:
            sys.stdout.write(f"{row['denied']}: {row['said']}\n")
    sys.stdout.write(f"needed: {' '.join(needed)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
