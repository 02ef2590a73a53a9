"""Tries the CUDA evaluator out on a machine with one GPU: one short command, everything it saw under one folder.

    python scripts/gpu_smoke.py OUT [--cases FOLDER] [--only WORD ...] [--budget SECONDS] [--aa REPEATS]

First a right and a wrong candidate with full tracebacks (where a worker cannot use the device, the layers of its
sandbox are taken apart until it can), then own kernels by every compile route, the red-team cases that need a GPU, and
the reference against itself. Writes OUT/gpu_smoke.jsonl (one evaluation a line) and OUT/gpu_smoke.log; prints a table.
No failure of one case stops the others.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu_smoke_cases import AA_TASKS, OWN_CASES, renamed  # noqa: E402

from evaluator import Evaluator, EvaluatorConfig  # noqa: E402
from evaluator.compile import CompilePool  # noqa: E402
from evaluator.compile.request import CompileRequest, CompileResult  # noqa: E402
from evaluator.compile.routes import arch_of  # noqa: E402
from evaluator.device import open_device  # noqa: E402
from evaluator.worker.sandbox import LAYERS  # noqa: E402
from tasks.records import Candidate, Evaluation, Task  # noqa: E402
from tasks.redteam import departure, selected  # noqa: E402
from tasks.reference_source import task_from_source  # noqa: E402

CASE_S = 60
BUILD_CASE_S = 100
_REQUESTS = """
import json, sys
from evaluator.compile import shim
class Stop(BaseException): pass
def ask(message):
    print(json.dumps(message)); raise Stop
shim.install(ask)
for path in sys.argv[1:]:
    try: exec(compile(open(path).read(), path, "exec"), {"__name__": "candidate"})
    except BaseException: pass
"""


@dataclass(frozen=True)
class Case:
    """One evaluation and what it should give."""

    name: str
    task: str
    candidate: str
    expect: str
    """`accept`, `reject`, or `aa`: accepted at a speedup of one."""
    reason: str = ""
    also_ok: tuple[str, ...] = ()
    neutral_speedup_max: float = 0.0
    builds: bool = False


@dataclass
class Run:
    """One run of the script."""

    out: Path
    device: str
    layers: tuple[str, ...] = LAYERS
    ends_at_s: float = float("inf")
    evaluator: Evaluator | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def judge(self) -> Evaluator:
        if self.evaluator is None:
            self.evaluator = Evaluator(open_device(self.device), _config(self.layers))
        return self.evaluator

    def reset(self) -> None:
        if self.evaluator is not None:
            self.evaluator.close()
            self.evaluator = None

    def one(self, case: Case) -> dict[str, Any]:
        """Evaluates one case; whatever goes wrong is a row."""
        began = time.monotonic()
        if began > self.ends_at_s:
            return self._add({"case": case.name, "verdict": "skipped"})
        row: dict[str, Any] = {"case": case.name, "expect": case.expect}
        try:
            with _limit(BUILD_CASE_S if case.builds else CASE_S):
                evaluation = self.judge().evaluate(_task(case.task), Candidate(source=case.candidate))
            row |= _described(evaluation) | {"verdict": _verdict(case, evaluation)}
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            logging.error("case %s failed", case.name, exc_info=True)
            row |= {"verdict": "ERROR", "message": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            self.reset()
        return self._add(row | {"seconds": round(time.monotonic() - began, 2)})

    def _add(self, row: dict[str, Any]) -> dict[str, Any]:
        self.rows.append(row)
        with open(self.out / "gpu_smoke.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        low = row.get("ci")
        speed = f"{row['speedup']:.3f} [{low[0]:.3f}, {low[1]:.3f}] {row['pairs']:4d}p {row['stopped']}" if low else ""
        print(
            f"{row['verdict']:9s} {row['case']:36s} {row.get('outcome', ''):9s} {row.get('reason') or '':20s} "
            f"{row.get('seconds', 0):6.1f}s {speed} {str(row.get('message', ''))[:160]}", flush=True,
        )  # fmt: skip
        return row


class _limit:
    """Raises TimeoutError in the main thread after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, *_: object) -> None:
        raise TimeoutError(f"the case took more than {self._seconds:g} s")


def _config(layers: tuple[str, ...]) -> EvaluatorConfig:
    return EvaluatorConfig.model_validate({
        "sandbox": {"layers": layers, "allow_unsandboxed": not layers}, "compile": {"slow_jobs": 6, "quick_jobs": 4},
    })  # fmt: skip


def _task(text: str) -> Task:
    return task_from_source(text, where="case", precision="fp32")


def _described(evaluation: Evaluation) -> dict[str, Any]:
    row: dict[str, Any] = {
        "outcome": evaluation.outcome, "reason": evaluation.reason, "step": evaluation.step,
        "message": evaluation.message, "labels": evaluation.labels, "isolation": evaluation.isolation,
        "by_step": evaluation.seconds_by_step, "detail": evaluation.detail, "facts": evaluation.facts,
        "device_type": evaluation.device_type, "turns": evaluation.turns,
    }  # fmt: skip
    found = evaluation.measurement
    if found is not None:
        row |= {
            "speedup": found.speedup, "ci": [found.ci_low, found.ci_high], "reference_ms": found.reference_ms,
            "candidate_ms": found.candidate_ms, "pairs": found.pairs, "stopped": found.stopped, "clocks": found.clocks,
        }  # fmt: skip
    return row


def _verdict(case: Case, evaluation: Evaluation) -> str:
    if evaluation.outcome == "unscored":
        return "UNSCORED"
    found = evaluation.measurement
    if case.expect == "aa":
        return "ok" if found is not None and found.ci_low <= 1.0 <= found.ci_high else "WRONG"
    if not departure(asdict(case), evaluation):
        return "ok"
    return "reason?" if case.expect == "reject" and evaluation.outcome == "rejected" else "WRONG"


def _redteam(folder: Path) -> list[Case]:
    cases = []
    for path, said in selected(folder, "cuda"):
        candidate = (path / "candidate.py").read_text()
        cases.append(Case(
            path.name, (path / "task.py").read_text(), candidate, said["expect"], said.get("reason") or "",
            tuple(said.get("also_ok") or ()), float(said.get("neutral_speedup_max") or 0), "load_inline" in candidate,
        ))  # fmt: skip
    return sorted(cases, key=lambda case: (case.builds, case.name == "resource__spinning-kernel"))


def _prebuild(cases: list[Case], out: Path, arch: str) -> list[Future[CompileResult]]:
    """Builds what the cases will ask for side by side, into the cache that they find it in."""
    paths = []
    for case in cases:
        if case.builds:
            path = out / f"{case.name}.candidate.py"
            path.write_text(case.candidate)
            paths.append(str(path))
    asking = [sys.executable, "-c", _REQUESTS, *paths]
    done = subprocess.run(asking, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    pool = CompilePool(_config(LAYERS).compile, arch=arch)
    return [pool.submit(CompileRequest.from_wire(json.loads(line))) for line in done.stdout.splitlines()]


def _take_apart(run: Run, case: Case) -> bool:
    """Finds the largest set of layers under which a worker can use the device."""
    whole = set(LAYERS)
    for without in ({"seccomp"}, {"landlock"}, {"landlock", "seccomp"}, {"pid"}, {"net", "ipc"}, {"pid", "landlock"}):
        run.reset()
        run.layers = tuple(layer for layer in LAYERS if layer in whole - without)
        print(f"--- without {sorted(without)}", flush=True)
        if run.one(case)["verdict"] == "ok":
            return True
    return False


def _control(run: Run, repeats: int) -> None:
    """The reference against itself, each time in new workers."""
    for number in range(repeats):
        for name, task in AA_TASKS.items():
            run.one(Case(f"aa_{name}_{number}", task, renamed(task), "aa"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--aa", type=int, default=1)
    parser.add_argument("--budget", type=float, default=480.0)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=given.out / "gpu_smoke.log", level=logging.INFO)
    run = Run(given.out, given.device, ends_at_s=time.monotonic() + given.budget)
    own = [Case(**case) for case in OWN_CASES]
    first, second = own[:2]
    try:
        if run.one(first)["verdict"] in ("UNSCORED", "ERROR") and not _take_apart(run, first):
            return
        run.one(second)
        cases = own[2:] + (_redteam(given.cases) if given.cases else [])
        cases = [case for case in cases if not given.only or any(word in case.name for word in given.only)]
        for case in (case for case in cases if not case.builds):
            run.one(case)
        _control(run, given.aa)
        builds = _prebuild(cases, given.out, arch_of(run.judge().device.type))
        for case in (case for case in cases if case.builds):
            while builds:
                built = builds.pop().result()
                print(f"built {built.name}: {built.ok} {built.seconds:.1f} s", flush=True)
            run.one(case)
    finally:
        run.reset()
        counts: dict[str, int] = {}
        for row in run.rows:
            counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
        print(counts, flush=True)


if __name__ == "__main__":
    main()
