"""kill -9 of the learner's process at each moment that matters, with the real store, trainer and publication.

Each life is a process of its own over one embedded server. It is killed inside the second step; the lives after it end
with the weights of a run that was never killed, to the bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from exemplar_store import EmbeddedServer, ExemplarStore, RunStream
from tasks.integrity import project_root

pytestmark = pytest.mark.heavy
STEPS, PER_STEP = 3, 2

LIFE = """
import asyncio, hashlib, json, os, signal, sys
from pathlib import Path

moment, url, folder, model, steps = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4], int(sys.argv[5])

from exemplar_store import ExemplarStore, RunStream
from learner import checkpoint, loop
from learner.actor import LearnerProcess
from learner.config import DeepSpeedConfig, GrpoConfig, LearnerConfig, OptimizerConfig, PolicyConfig, PublishConfig
import safetensors.torch

seen = 0

def die_at(name, number=2):
    global seen
    if name != moment:
        return
    seen += 1
    if seen == number:
        os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name, moment_name):
    inner = getattr(owner, name)
    def wrapped(*arguments, **named):
        die_at(moment_name)
        return inner(*arguments, **named)
    setattr(owner, name, wrapped)

# The moments: the step is done and its checkpoint not begun; shards are written and not marked; the checkpoint stands
# and its groups are not acked; the weights are on their way.
before(checkpoint.CheckpointFolder, "begin", "after the step")
before(checkpoint.CheckpointFolder, "complete", "inside the checkpoint")
before(RunStream, "ack", "before the ack")
inner_save = safetensors.torch.save_file
def save_file(*arguments, **named):
    inner_save(*arguments, **named)
    die_at("before the file's name", 3)
safetensors.torch.save_file = save_file

class Remote:
    def __init__(self, call):
        self.remote = call

class Engine:
    def __init__(self):
        self.begin_update, self.load_weights, self.finish_update = map(Remote, (self.begin, self.load, self.finish))
    async def begin(self):
        return None
    async def load(self, source):
        die_at("during the transfer", 3)
        from safetensors.torch import load_file
        self.tensors = load_file(source.paths[0])
    async def finish(self, version):
        die_at("before the resume", 3)
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        with (folder / "engine.jsonl").open("a") as file:
            file.write(json.dumps({"version": str(version), "weights": digest.hexdigest()}) + "\\n")

config = LearnerConfig(
    device="cpu", policy=PolicyConfig(model=model, lora_rank=4, dtype="fp32"),
    optimizer=OptimizerConfig(learning_rate=1e-2), deepspeed=DeepSpeedConfig(zero_stage=1),
    grpo=GrpoConfig(groups_per_step=2, max_staleness=100), publish=PublishConfig(folder=str(folder / "shm")),
)

async def life():
    stream = lambda: RunStream(ExemplarStore.connect(url), "r")
    learner, engine = LearnerProcess(config, "r", str(folder / "checkpoints"), stream), Engine()
    await learner.ready()
    await learner.publish([engine])
    while (await learner.standing()).step < steps:
        learned = await learner.learn()
        assert learned.stepped, "the groups do not suffice for the steps: some were lost"
        await learner.publish([engine])
    standing = await learner.standing()
    print(json.dumps({"epoch": standing.epoch, "step": standing.step, "fates": dict(standing.fates)}))

asyncio.run(life())
"""


@dataclass
class Run:
    """One run over a store of its own."""

    url: str
    folder: Path
    model: Path
    stream: RunStream

    def live(self, moment: str = "never") -> subprocess.CompletedProcess[str]:
        """One life of the learner, killed at the moment."""
        environment = {**os.environ, "PYTHONPATH": str(project_root()), "OMP_NUM_THREADS": "1"}
        arguments = [moment, self.url, str(self.folder), str(self.model), str(STEPS)]
        return subprocess.run(
            [sys.executable, "-c", LIFE, *arguments], env=environment, capture_output=True, text=True, timeout=200,
            check=False,
        )  # fmt: skip

    def engine(self) -> list[dict[str, str]]:
        """What the engine went on with, publication by publication."""
        return [json.loads(line) for line in (self.folder / "engine.jsonl").read_text().splitlines()]

    def pending(self) -> int:
        """Groups that the store still holds for a learner."""
        return len(self.stream.claim_all(self.stream.fence("learner")))


def prepared(folder: Path, model: Path, records: Any, store: ExemplarStore, url: str) -> Run:
    """A run with all its groups scored beforehand."""
    stream = RunStream(store, "r")
    for number in range(STEPS * PER_STEP):
        name = f"r-g{number}"
        group = records.group([], group_id=name, prompt_ids=tuple(range(3, 9)))
        stream.open_group(group.prompt, 2)
        for index in range(2):
            ids = tuple(3 + (7 * number + 5 * index + j) % 60 for j in range(4 + index))
            judged = records.evaluation(1.0 + index) if index else records.evaluation(reason="incorrect")
            stream.record(records.scored(index, judged, prompt_id=name, token_ids=ids, logprobs=(-4.0,) * len(ids)))
    stream.relay()
    folder.mkdir(exist_ok=True)
    return Run(url, folder, model, stream)


@pytest.fixture
def runs(tmp_path: Path, tiny_model: Path, records: Any) -> Iterator[Any]:
    """Makes runs, each over an embedded server of its own."""
    servers: list[EmbeddedServer] = []

    def make(name: str) -> Run:
        servers.append(EmbeddedServer(tmp_path / f"store-{name}").__enter__())
        store = ExemplarStore.connect(servers[-1].url)
        return prepared(tmp_path / name, tiny_model, records, store, servers[-1].url)

    yield make
    for server in servers:
        server.__exit__(None, None, None)


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, records: Any) -> dict[str, str]:
    """What the engine holds after each step of a run that is not killed, by step."""
    folder = tmp_path_factory.mktemp("unkilled")
    with EmbeddedServer(folder / "store") as server, ExemplarStore.connect(server.url) as store:
        run = prepared(folder / "run", tiny_model, records, store, server.url)
        done = run.live()
        assert done.returncode == 0, done.stderr
        assert run.pending() == 0
        return {line["version"].partition(".")[2]: line["weights"] for line in run.engine()}


@pytest.mark.parametrize(("moment", "step"), [
    ("after the step", 1), ("inside the checkpoint", 1), ("before the ack", 2), ("before the file's name", 2),
    ("during the transfer", 2), ("before the resume", 2),
])  # fmt: skip
def test_the_next_life_goes_on_as_if_nothing_had_happened(
    runs: Any, unkilled: dict[str, str], moment: str, step: int
) -> None:
    """`step` is where the second life begins: at the checkpoint that the first left whole."""
    run = runs("killed")
    first = run.live(moment)
    assert first.returncode == -9, f"it was not killed: {first.stdout + first.stderr}"
    known = len(run.engine())
    second = run.live()
    assert second.returncode == 0, second.stderr
    said = json.loads(second.stdout.splitlines()[-1])
    assert (said["epoch"], said["step"]) == (1, STEPS)
    assert said["fates"] == {f"r-g{number}": "trained" for number in range(STEPS * PER_STEP)}
    assert run.pending() == 0, "every group was acked"

    lines = run.engine()
    assert lines[known]["version"] == f"1.{step}", "published before anything else, at the surviving checkpoint"
    assert [line["version"] for line in lines[known:]] == [f"1.{n}" for n in range(step, STEPS + 1)]
    for line in lines:
        assert line["weights"] == unkilled[line["version"].partition(".")[2]], f"other weights at {line['version']}"
    assert [path.name for path in (run.folder / "shm" / "kontrast-r").iterdir()] == [f"policy-1.{STEPS}.safetensors"]
    assert len([p for p in (run.folder / "checkpoints").iterdir() if p.suffix != ".partial"]) == 2
    assert not list((run.folder / "checkpoints").glob("*.partial"))
