"""The evaluator of one device: it owns the zygote, the warm reference server and one worker at a time."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from evaluator import metrics
from evaluator.activity import Activity
from evaluator.baselines import baseline_of, rival
from evaluator.compile import CompilePool, Toolchain, discover
from evaluator.compile.routes import arch_of
from evaluator.config import EvaluatorConfig
from evaluator.device import Device, DeviceLock, DeviceTurn, open_device
from evaluator.duel import DuelFlow
from evaluator.flow import Flow
from evaluator.given import CandidateLike, TaskLike, candidate_of, task_of
from evaluator.sides import ReferenceFailed
from evaluator.timing.statistics import PlacementHistory
from evaluator.timing.turns import Arm, ArmFault
from evaluator.worker import allocator
from evaluator.worker.process import Zygote
from evaluator.worker.wire import read_text, write_text
from tasks.errors import UsageError
from tasks.records import Candidate, Evaluation, Task
from tasks.records.evaluation import Baseline, Protocol

if TYPE_CHECKING:
    from evaluator.device_cuda import Gauges

_INDUCTOR = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
}  # fmt: skip
"""torch.compile without interpreters of its own, which a worker may not start."""


_ADMISSIONS = 256
"""Admissions kept, so that going back to a task costs no oracle."""


Seat = Literal[0, 1]
"""One warm reference for each candidate that is timed at once."""


class WarmReference:
    """The reference server of one task."""

    def __init__(self, arm: Arm, task: Task, opened: dict[str, Any]) -> None:
        self.arm = arm
        self.task = task
        self.opened = opened

    def ask(self, request: dict[str, Any], timeout_s: float = 60.0, descriptors: Sequence[int] = ()) -> Any:
        """One request outside the timing; returns the turn. Raises ReferenceFailed."""
        try:
            turn = self.arm.take(request, timeout_s, descriptors)
        except ArmFault as fault:
            raise ReferenceFailed(f"the reference server failed: {fault}") from fault
        if turn.answer.get("op") == "failed":
            raise ReferenceFailed(_said(turn.answer))
        return turn


def _said(failed: dict[str, Any]) -> str:
    """What the server's answer says about the task."""
    where = f" (line {failed['line']})" if failed["line"] else ""
    what = failed["text"] if failed["kind"] == "IllFormedTask" else f"{failed['kind']}: {failed['text']}"
    if failed["stage"] == "open":
        return f"the task cannot be used: {what}{where}"
    return f"the reference server failed in {failed['stage']}: {what}{where}"


class Evaluator:
    """Evaluates candidates on one device; a context manager.

    References stay warm per task, candidates are evaluated one after the other, and nothing is answered from an earlier
    evaluation. `close` (or leaving the context) ends every process.
    """

    def __init__(self, device: str | Device = "cpu", config: EvaluatorConfig | None = None) -> None:
        self.config = config or EvaluatorConfig()
        self.device: Device = device if isinstance(device, Device) else open_device(device, self.config.threads)
        self.lock = DeviceLock(self.device.lock_path, shared=bool(self.device.runtime))
        self.activity = Activity()
        """What is done now, for whoever waits."""
        self.history: PlacementHistory | None = None
        """Placement variance of earlier controls on this device type; enough of it makes timings shorter."""
        self._zygote: Zygote | None = None
        self._references: dict[Seat, WarmReference] = {}
        self._pool: CompilePool | None = None
        self._gauges: Gauges | None = None
        self._admissions: dict[str, str] = {}
        self._scratch = os.path.join(tempfile.gettempdir(), f"kontrast-{secrets.token_hex(8)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def evaluate(
        self, task: TaskLike, candidate: CandidateLike, *, confirm: bool = False, seed: bytes | None = None,
        protocol: Protocol | None = None, against: CandidateLike | None = None,
        baseline: Baseline = "eager", profile: bool = False,
    ) -> Evaluation:  # fmt: skip
        """Judges one candidate against one task, each a record, a path or text; never raises for what the candidate
        does.

        With `confirm` an accepted speedup is measured again on fresh seeds, as it is above `timing.confirm_above`.
        `seed` draws the inputs of an earlier evaluation again (its `detail["seed"]`); without it they are secret.
        `protocol` is used instead of the configured one. With another candidate in `against` both are checked against
        the reference and timed against each other: the speedup is over that candidate. With another `baseline` it is
        over the reference run in that way. With `profile` an accepted candidate is looked at more closely after the
        timing. Raises UsageError for a baseline that this device has not, and for a task or candidate that is none.
        """
        task, candidate = task_of(task, self.device.type), candidate_of(candidate)
        config = self.config if protocol is None else self.config.model_copy(update={"protocol": protocol})
        opponent = rival(candidate_of(against)) if against is not None else None
        if baseline == "graph" and not self.device.runtime:
            raise UsageError("--baseline graph needs a CUDA device: give --device cuda, or --baseline compile")
        if baseline == "compile" and not self.device.runtime and not self.toolchain().cxx:
            raise UsageError("--baseline compile needs a C++ compiler on a CPU: install g++, or give --baseline eager")
        if opponent is None and baseline in ("compile", "graph"):
            opponent = baseline_of(task, baseline)
        if opponent is None:
            flow = Flow(self, task, candidate, config=config, confirm=confirm, seed=seed, profiled=profile)
        else:
            flow = DuelFlow(
                self, task, candidate, opponent, config=config, confirm=confirm, seed=seed, profiled=profile
            )
        with self.activity.doing(f"the evaluation on {task.id}"):
            evaluation = flow.run()
        metrics.count(evaluation, flow.waited_s)
        return evaluation

    def control(self, task: TaskLike) -> Evaluation:
        """The reference against itself through the whole path, in new processes: its interval has to cover 1."""
        task = task_of(task, self.device.type)
        source = f"{task.source}\nclass ModelNew(Model):\n    pass\n"
        evaluation = self.evaluate(task, Candidate(source=source, origin="reference"))
        if evaluation.measurement is not None:
            metrics.CONTROL_RATIO.labels(self.device.type).set(evaluation.measurement.speedup)
        return evaluation

    def zygote(self) -> Zygote:
        """The running zygote, started when there is none."""
        if self._zygote is None or not self._zygote.alive():
            self.close_processes()
            self._zygote = Zygote(
                threads=self.config.threads, lock_descriptor=self.lock.descriptor, scratch=self._scratch,
                environment={
                    "PATH": discover().search_path(self.device.type), **_INDUCTOR, **dict(self.device.environment),
                },
                modules=self.device.modules, allocator=allocator.library(),
            )  # fmt: skip
            start_s = self.config.deadlines.start_s
            with self.activity.doing("torch to be imported", start_s):
                self._zygote.start(start_s)
            metrics.RESTARTS.labels(self.device.type).inc()
        return self._zygote

    def reference(self, task: Task, seat: Seat = 0) -> WarmReference:
        """The warm reference of a task; raises ReferenceFailed."""
        warm = self._references.get(seat)
        if warm is not None and warm.task.content_hash == task.content_hash and warm.arm.child.alive():
            return warm
        self.drop_reference(seat)
        settings = {"cores": list(self.device.judge_cores), "runtime": self.device.runtime}
        arm = Arm(self.zygote().spawn_reference(settings), trusted=True, turn=self.turn())
        arm.child.stop()
        warm = WarmReference(arm, task, {})
        try:
            self._open(warm)
        except ReferenceFailed:
            arm.child.kill()
            raise
        self._references[seat] = warm
        return warm

    def _open(self, warm: WarmReference) -> None:
        """Loads the task into its server; an admission of this session is not made again."""
        task, seed = warm.task, secrets.randbits(48)
        known = self._admissions.get(task.content_hash, "")
        request = {
            "op": "open", "precision": task.precision, "mode": task.mode, "seed": seed, "known": bool(known),
        }  # fmt: skip
        texts = [memory_file(task.source), memory_file(known)]
        try:
            warm.opened = warm.ask(request, self.config.deadlines.reference_s, texts).answer
            if not known:
                warm.ask({"op": "admission"}, descriptors=texts[1:])
                self._admissions[task.content_hash] = read_text(texts[1])
        finally:
            for number in texts:
                os.close(number)
        warm.opened["construct_seed"] = seed
        while len(self._admissions) > _ADMISSIONS:
            del self._admissions[next(iter(self._admissions))]

    def zygote_alive(self) -> bool:
        """Whether the zygote runs."""
        return self._zygote is not None and self._zygote.alive()

    def turn(self) -> DeviceTurn:
        """How an arm gets the device for a turn."""
        return DeviceTurn(self.lock, self.config.lock_timeout_s)

    def gauges(self) -> Gauges | None:
        """Clocks, power and memory of the device; None where it has none to read."""
        if self._gauges is None and self.device.uuid:
            from evaluator.device_cuda import Gauges

            self._gauges = Gauges(self.device.uuid)
        return self._gauges

    def scratch(self) -> str:
        """A new folder name for a worker on a machine without mount namespaces."""
        return os.path.join(self._scratch, secrets.token_hex(8))

    def toolchain(self) -> Toolchain:
        """What workers may read and execute beside the interpreter."""
        return discover()

    def compile_pool(self) -> CompilePool:
        """The pool that builds what workers ask for, started with the first request."""
        if self._pool is None:
            self._pool = CompilePool(
                self.config.compile, arch=arch_of(self.device.type),
                cores=self.device.judge_cores if self.device.type == "cpu" else (),
                allow_unsandboxed=self.config.sandbox.allow_unsandboxed,
            )  # fmt: skip
        return self._pool

    def text_descriptor(self, text: str) -> int:
        """A descriptor with the text, to be closed by the caller."""
        return memory_file(text)

    def drop_reference(self, seat: Seat | None = None) -> None:
        """Ends the reference server of a seat, of all for None."""
        for one in list(self._references) if seat is None else [seat]:
            warm = self._references.pop(one, None)
            if warm is not None:
                warm.arm.child.kill()

    def close_processes(self) -> None:
        """Ends all processes; the next evaluation starts new ones."""
        self.drop_reference()
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def close(self) -> None:
        """Ends all processes and gives the device up."""
        self.close_processes()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self.lock.close()


def memory_file(text: str) -> int:
    """A descriptor of a memory file with the text."""
    descriptor = os.memfd_create("text", os.MFD_CLOEXEC)
    write_text(descriptor, text)
    return descriptor


def evaluate(
    task: TaskLike, candidate: CandidateLike, *, device: str = "cpu", config: EvaluatorConfig | None = None
) -> Evaluation:
    """Measures one candidate against its task and says whether it is accepted, and at which speedup.

    Task and candidate are records, paths of files, an id such as `procedural:row_norm/17` for the task, or source
    text. `device` is `cpu` or `cuda[:i]`. Starts the evaluator's processes and ends them again: for many candidates
    use `Evaluator`, which keeps them. Raises UsageError for a device that is not there, an unreadable file, an unknown
    id and an ill-formed task.
    """
    with Evaluator(device, config) as evaluator:
        return evaluator.evaluate(task, candidate)
