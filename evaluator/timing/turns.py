"""Arms and turns: who may run now, for how long, and what the judge saw of it.

Invariants: an arm is stopped whenever it has no turn; a turn begins only when the other arm is seen stopped, and its
span ends when every thread of the arm is seen stopped again, so that nothing the arm says can shorten it; each request
has one deadline, and memory is watched while the judge waits.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from evaluator.compile.request import BadRequest
from evaluator.device import DeviceTurn
from evaluator.worker import wire
from evaluator.worker.process import Child, ProcessLost

_WATCH_S = 0.05

Serve = Callable[[dict[str, Any]], tuple[dict[str, Any], int | None]]
"""From a worker's `compile` message to the answer and the library's descriptor."""


class ArmFault(RuntimeError):
    """An arm did not answer its request, or died after it had; `kind` is a word of `Ending.kind` or `forged`."""

    def __init__(self, kind: str, text: str, answer: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.answer = answer


@dataclass(frozen=True)
class Turn:
    """One answered request: the answer, and the judge's span from the go to the confirmed stop."""

    answer: dict[str, Any]
    descriptors: list[int]
    span_ns: int
    ran_ns: int = 0
    """Processor time of the arm's threads in the span."""
    waited_ns: int = 0
    """Time that they were ready and others ran."""
    end_ns: int = 0
    """When the arm was seen stopped, on the judge's clock."""


class Arm:
    """A child process that works only in its turns."""

    def __init__(
        self, child: Child, *, trusted: bool, memory_limit_bytes: int | None = None, turn: DeviceTurn | None = None
    ) -> None:  # fmt: skip
        self.child = child
        self.trusted = trusted
        self._limit = memory_limit_bytes
        self._turn = turn
        self.peak_rss_bytes = 0
        self.serve: Serve | None = None
        """Builds what the arm asks for in the middle of a turn; the arm is stopped meanwhile."""
        self.served_s = 0.0
        """Time that builds took and that the device was waited for, which counts against no deadline."""

    def take(self, request: dict[str, Any], timeout_s: float, descriptors: Sequence[int] = ()) -> Turn:
        """Gives the arm one turn for one request. Raises ArmFault, DeviceBusy; the arm must then be killed."""
        if self._turn is None:
            return self._take(request, timeout_s, descriptors)
        with self._turn.taken() as waited_s:
            self.served_s += waited_s
            return self._take(request, timeout_s, descriptors)

    def _take(self, request: dict[str, Any], timeout_s: float, descriptors: Sequence[int]) -> Turn:
        channel = self.child.channel
        ran, waited = self.child.cpu_ns()
        answer: dict[str, Any] | None = None
        try:
            wire.send(channel, request, descriptors)
            begin_ns = time.perf_counter_ns()
            self.child.resume()
            answer, received = self._await(timeout_s)
            end_ns = self.child.stop()
        except (wire.WireClosed, ProcessLost) as error:
            raise self._death(answer) from error
        except wire.WireForged as error:
            raise ArmFault("forged", str(error)) from error
        ran_after, waited_after = self.child.cpu_ns()
        return Turn(answer, received, end_ns - begin_ns, ran_after - ran, waited_after - waited, end_ns)

    def _await(self, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                if self.trusted:
                    return wire.receive_trusted(self.child.channel, min(_WATCH_S, max(left, 0.0)))
                message = wire.receive(self.child.channel, min(_WATCH_S, max(left, 0.0)))
                if message.get("op") != "compile" or self.serve is None:
                    return message, []
                deadline += self._build(self.serve, message)
            except wire.WireTimeout:
                if left <= 0:
                    raise ArmFault("deadline", f"no answer within {timeout_s:.3g} s") from None
                self.watch()

    def _build(self, serve: Serve, message: dict[str, Any]) -> float:
        """Answers a request for a build; returns the seconds it took."""
        begin = time.monotonic()
        self.child.stop()
        try:
            with nullcontext() if self._turn is None else self._turn.lent():
                answer, descriptor = serve(message)
        except BadRequest as error:
            raise ArmFault("forged", f"a build request off its schema: {error}") from error
        try:
            wire.send(self.child.channel, answer, [] if descriptor is None else [descriptor])
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self.child.resume()
        took_s = time.monotonic() - begin
        self.served_s += took_s
        return took_s

    def watch(self) -> int:
        """Reads the arm's private memory; raises ArmFault above the limit."""
        rss = self.child.rss_bytes()
        self.peak_rss_bytes = max(self.peak_rss_bytes, rss)
        if self._limit is not None and rss > self._limit:
            raise ArmFault("memory_limit", f"{rss >> 20} MiB of memory, over the limit of {self._limit >> 20} MiB")
        return rss

    def _death(self, answer: dict[str, Any] | None) -> ArmFault:
        self.child.resume()  # the intermediary, which reports the exit code, is of the same group
        code = self.child.poll_exit(0.5)
        if code is None:
            return ArmFault("exit", "no exit code", answer)
        if code < 0:
            return ArmFault("signal", signal_name(-code), answer)
        return ArmFault("exit", f"exit code {code}", answer)


def signal_name(number: int) -> str:
    """`SIGSEGV` for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
