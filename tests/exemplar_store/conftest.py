"""A server for the whole session, a store of its own for each test, and records to fill it with."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exemplar_store import EmbeddedServer, ExemplarStore, StoreConfig
from exemplar_store import server as server_module
from tasks.records import Candidate, Evaluation, Exemplar, Measurement, Prompt, Sample, ScoredSample

TASK = "a" * 64
SERVER_VARIABLE = "KONTRAST_TEST_SERVER"
_namespaces = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def server_program() -> Iterator[Path]:
    """The packaged server, or the program that KONTRAST_TEST_SERVER names: the same tests on another server."""
    program = Path(os.environ.get(SERVER_VARIABLE) or server_module.find_server_binary())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "find_server_binary", lambda: program)
        yield program


@pytest.fixture(scope="session")
def server(server_program: Path) -> Iterator[EmbeddedServer]:
    with tempfile.TemporaryDirectory(prefix="kontrast-test-") as folder, EmbeddedServer(folder) as running:
        yield running


@pytest.fixture
def open_store(server: EmbeddedServer) -> Iterator[Callable[..., ExemplarStore]]:
    """Opens stores on the session's server; those of one test share a namespace, or one for each name it gives."""
    opened = []
    namespace = f"test{next(_namespaces)}"

    def factory(**settings: object) -> ExemplarStore:
        config = StoreConfig.model_validate({**settings, "namespace": namespace + str(settings.get("namespace", ""))})
        opened.append(ExemplarStore.connect(server.url, config))
        return opened[-1]

    yield factory
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., ExemplarStore]) -> ExemplarStore:
    return open_store()


def _measurement(speedup: float, device_type: str, protocol: str) -> Measurement:
    return Measurement.model_validate({
        "speedup": speedup, "ci_low": speedup * 0.98, "ci_high": speedup * 1.02, "reference_ms": 1.0,
        "candidate_ms": 1.0 / speedup, "pairs": 20, "device_type": device_type, "protocol": protocol,
    })  # fmt: skip


@pytest.fixture
def make_exemplar() -> Callable[..., Exemplar]:
    def make(
        number: int, speedup: float = 1.5, task_hash: str = TASK, device_type: str = "cpu", protocol: str = "sequential"
    ) -> Exemplar:
        candidate = Candidate(source=f"import torch\n\n\nclass ModelNew(torch.nn.Module):\n    number = {number}\n")
        return Exemplar(
            task_id="procedural:row_norm/1", task_hash=task_hash, device_type=device_type, source=candidate.source,
            candidate_hash=candidate.content_hash, speedup=speedup,
            measurement=_measurement(speedup, device_type, protocol), origin=f"test {number}",
        )  # fmt: skip

    return make


@pytest.fixture
def make_prompt() -> Callable[..., Prompt]:
    def make(group_id: str, run_id: str = "run", task_hash: str = TASK) -> Prompt:
        return Prompt(
            id=group_id, run_id=run_id, task_id="procedural:row_norm/1", task_hash=task_hash, device_type="cpu",
            text=f"prompt of {group_id}", token_ids=(1, 2, 3),
        )  # fmt: skip

    return make


@pytest.fixture
def make_scored() -> Callable[..., ScoredSample]:
    """A scored sample; `outcome` None makes a cancelled one."""

    def make(
        group_id: str, index: int, outcome: str | None = "accepted", speedup: float = 1.5, task_hash: str = TASK
    ) -> ScoredSample:
        candidate = Candidate(source=f"group = {group_id!r}\nindex = {index}\n", origin="sample")
        sample = Sample(
            id=f"{group_id}/{index}", prompt_id=group_id, index=index, text=candidate.source, token_ids=(4, 5),
            logprobs=(-0.5, -0.25), candidate=candidate,
        )  # fmt: skip
        if outcome is None:
            return ScoredSample(sample=sample, evaluation=None)
        reasons = {"accepted": None, "rejected": "incorrect", "unscored": "evaluator_lost"}
        evaluation = Evaluation.model_validate({
            "outcome": outcome, "reason": reasons[outcome], "step": "time", "task_id": "procedural:row_norm/1",
            "task_hash": task_hash, "candidate_hash": candidate.content_hash,
            "measurement": _measurement(speedup, "cpu", "sequential") if outcome == "accepted" else None,
        })  # fmt: skip
        return ScoredSample(sample=sample, evaluation=evaluation)

    return make


@pytest.fixture
def exemplar_of() -> Callable[[ScoredSample], Exemplar]:
    """The exemplar that an accepted sample brings."""

    def make(scored: ScoredSample) -> Exemplar:
        evaluation, candidate = scored.evaluation, scored.sample.candidate
        assert evaluation is not None
        assert evaluation.measurement is not None
        assert candidate is not None
        return Exemplar(
            task_id=evaluation.task_id, task_hash=evaluation.task_hash, device_type="cpu", source=candidate.source,
            candidate_hash=candidate.content_hash, speedup=evaluation.measurement.speedup,
            measurement=evaluation.measurement, origin=scored.sample.id,
        )  # fmt: skip

    return make
