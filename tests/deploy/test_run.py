"""Whole runs on real Ray with small stand-ins for model and device: to the end, and through kill -9 of every role.

The stand-ins use the real store and the real coordinator; what they replace is only what needs a model or a timer.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deploy.config import Config, load_config
from deploy.folder import RunFolder
from deploy.graph.events import CoordinatorStarted, Event, GroupFormed, SampleLeft, StepLearned, event_from_dict
from deploy.graph.ledger import Ledger
from deploy.graph.run import Setting, Workers, execute
from deploy.graph.state import RunState
from deploy.graph.tools import Seed, Tools
from deploy.observe.follow import Follower
from exemplar_store import ExemplarStore, RunStream
from learner.loop import Learned, Standing
from learner.publish import Publication
from tasks.integrity import project_root
from tasks.records import Candidate, Evaluation, Measurement, PolicyVersion, Prompt, Sample, Task

pytestmark = pytest.mark.heavy
TASKS = [Task(id=f"file:{name}", source=f"class Model: {name} = 1") for name in ("a", "b")]
SETTINGS = [
    "--evaluator.pool.H100", "0", "--evaluator.pool.cpu", "1", "--evaluator.protocol", "sequential",
    "--learner.steps", "2", "--learner.grpo.groups_per_step", "2",
    "--rollout.staleness.max_staleness", "0", "--rollout.sampling.group_size", "3", "--cluster.take_turns", "true",
    "--cluster.generator_gpus", "0", "--cluster.learner_gpus", "0", "--cluster.generator_cpus", "0.1",
    "--cluster.learner_cpus", "0.1", "--cluster.evaluator_cpus", "0.1", "--cluster.attempts", "5",
]  # fmt: skip


class FakeGenerator:
    """Completions whose text names their sample."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.version = PolicyVersion()
        Path(folder, f"generator-{os.getpid()}.pid").touch()
        print("a stand-in generates", file=sys.stderr)

    def load(self, version: PolicyVersion) -> None:
        self.version = version

    def sleep(self) -> None:
        return None

    def wake(self) -> None:
        return None

    def draw(self, prompt: Prompt, indices: list[int]) -> Iterator[Any]:
        for index in indices:
            time.sleep(0.15)
            yield index, 2, False
            name = f"{prompt.id}/{index}"
            yield Sample(
                id=name, prompt_id=prompt.id, index=index, text="", token_ids=(1, 2), logprobs=(-0.1, -0.2),
                policy_versions=(self.version,), candidate=Candidate(source=f"x = {name!r}", detail=name),
            )  # fmt: skip


class FakeEvaluator:
    """Accepts everything after a moment."""

    def __init__(self, folder: str) -> None:
        Path(folder, f"evaluator-{os.getpid()}.pid").touch()

    def evaluate(self, task: Task, candidate: Candidate, protocol: str) -> Evaluation:
        time.sleep(0.1)
        timing = Measurement(speedup=1.5, ci_low=1.4, ci_high=1.6, reference_ms=3, candidate_ms=2, pairs=20)
        return Evaluation(
            outcome="accepted", step="time", measurement=timing, task_id=task.id, task_hash=task.content_hash,
            candidate_hash=candidate.content_hash, protocol=protocol,
        )  # fmt: skip


class FakeLearner:
    """Trains nothing, but reads, checkpoints, resumes and publishes like the real one."""

    def __init__(self, folder: str, location: str, run_id: str, per_step: int) -> None:
        self.folder, self.per_step = Path(folder), per_step
        Path(folder, f"learner-{os.getpid()}.pid").touch()
        self.stream = RunStream(ExemplarStore.connect(location), run_id)
        token = self.stream.fence("learner")
        saved = self.folder / "learner.txt"
        lines = saved.read_text().split("\n") if saved.is_file() else ["0"]
        self.step, trained = int(lines[0]), [line for line in lines[1:] if line]
        self.epoch = len(list(self.folder.glob("learner-*.pid"))) - 1
        self.fates = dict.fromkeys(trained, "trained")
        claimed = self.stream.claim_all(token, "learner")
        self.stream.ack([entry for entry, group in claimed if group.id in self.fates])
        self.waiting = [(entry, group) for entry, group in claimed if group.id not in self.fates]

    def standing(self) -> Standing:
        return Standing(self.epoch, self.step, dict(self.fates))

    def learn(self, *, partial: bool) -> Learned:
        self.waiting += self.stream.read_scored("learner", 100, 0)
        time.sleep(0.5)
        stepped = len(self.waiting) >= self.per_step or (partial and bool(self.waiting))
        if stepped:
            used, self.waiting = self.waiting[: self.per_step], self.waiting[self.per_step :]
            self.step += 1
            self.fates |= {group.id: "trained" for _, group in used}
            (self.folder / "learner.tmp").write_text("\n".join([str(self.step), *self.fates]))
            (self.folder / "learner.tmp").rename(self.folder / "learner.txt")
            self.stream.ack([entry for entry, _ in used])
        return Learned(self.standing(), stepped, {"loss": 0.5})

    def publish(self, generators: list[Any]) -> Publication:
        import ray

        version = PolicyVersion(epoch=self.epoch, step=self.step)
        ray.get([generator.load.remote(version) for generator in generators])
        return Publication(version, {"transfer": 0.1}, 1, 2, len(generators))

    def checkpoint(self) -> None:
        return None


def make_tools(name: str) -> Tools:
    async def evaluate(
        task: Task, candidate: Candidate, device_type: str, protocol: str, first: Any = None
    ) -> Evaluation:
        import ray

        for _ in range(20):
            try:
                return await ray.get_actor(name).evaluate.remote(task, candidate, protocol)
            except ray.exceptions.RayActorError:
                await asyncio.sleep(0.3)
        raise TimeoutError("no evaluator came back")

    def build_prompt(task: Task, exemplars: Any, mates: Any, group: Any) -> Prompt:
        return Prompt(
            id=group.id, run_id=group.id.rsplit("-g", 1)[0], task_id=task.id, task_hash=task.content_hash,
            device_type="cpu", text="Go.", exemplar_hashes=tuple(e.candidate_hash for e in exemplars),
        )  # fmt: skip

    async def control(task: Task, device_type: str, protocol: str) -> Evaluation:
        made = await evaluate(task, Candidate(source=task.source, origin="reference"), device_type, protocol)
        return made.model_copy(update={"detail": {"seed": secrets.token_hex(8)}})

    return Tools(build_prompt, lambda task: [Seed("seed", "slow", "seed = 1")], evaluate, control)


def make_workers(ray: Any, setting: Setting) -> Workers:
    folder, names = (
        str(setting.run.path),
        {role: setting.actor_name(role) for role in ("generator", "evaluator", "learner")},
    )

    def start(role: str, made: Any, *arguments: Any) -> Any:
        options = {"num_cpus": 0.1, "max_restarts": -1, "max_task_retries": 0, "name": names[role]}
        return ray.remote(made).options(**options).remote(folder, *arguments)

    actors = [
        start("generator", FakeGenerator),
        start("evaluator", FakeEvaluator),
        start("learner", FakeLearner, setting.location, setting.run.run_id, setting.plan.groups_per_step),
    ]
    return Workers([names["generator"]], names["learner"], partial(make_tools, names["evaluator"]), actors)


@pytest.fixture(autouse=True)
def _by_value() -> None:
    """Ray's workers cannot import a test module: its classes travel with the call."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster for the tests that need no cluster of their own; each run joins and leaves it."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()


def id_of(folder: Path) -> str:
    """A run id of this test's own: runs on one cluster may not share one."""
    return f"r-{zlib.crc32(str(folder).encode()):08x}"


def run(
    folder: Path,
    address: str = "",
    act: Callable[[RunFolder, list[Event]], None] = lambda run, events: None,
    stage: str = "",
) -> RunState:
    """A whole run, or a stage of one; `act` sees the run's new events about once a second."""
    config: Config = load_config("cluster", [*SETTINGS, "--cluster.address", address])
    run_folder = RunFolder(folder / id_of(folder)).create()
    if stage:
        run_folder = run_folder.stage(stage).create()
    followers: list[Follower] = []

    def follow(plan: Any, read: Any) -> Callable[[], object]:
        follower = Follower(run_folder, plan, read, lambda figures: None)
        followers.append(follower)

        def watch() -> None:
            act(run_folder, follower.catch_up())

        return watch

    execute(config, run_folder, TASKS, make_workers, follow)
    state = followers[0].state
    assert followers[0].summarize()["samples"] == state.ledger.samples.counts()
    assert len(run_folder.events.read_text().splitlines()) > 10
    return state


def check(state: RunState) -> None:
    """2 steps of 2 groups of 3 samples, both ledgers balanced."""
    state.ledger.check()
    assert state.closed == "finished"
    assert state.step == 2
    assert state.ledger.groups.counts()["trained"] == 4
    assert state.ledger.samples.counts()["in_flight"] == 0


def test_a_run_to_the_end(tmp_path: Path, address: str) -> None:
    state = run(tmp_path, address)
    check(state)
    assert state.ledger.samples.counts()["accepted"] == 12
    assert len(state.confirmed) == 2
    assert state.controls["cpu", "sequential"].measured == 12
    summary = json.loads((tmp_path / id_of(tmp_path) / "summary.json").read_text())
    assert [(one["measured"], one["coverage"]) for one in summary["controls"]] == [(12, 0.0)]
    assert sorted((tmp_path / id_of(tmp_path) / "kernels").rglob("*.py"))
    logs = {path.name: path.read_text() for path in (tmp_path / id_of(tmp_path) / "logs").iterdir()}
    assert all(text.strip() and ":job_id:" not in text for text in logs.values())
    assert [name for name, text in logs.items() if "a stand-in generates\n" in text], logs


def test_two_stages_of_a_run_keep_their_events_apart_and_share_the_store(tmp_path: Path, address: str) -> None:
    states = [run(tmp_path, address, stage=name) for name in ("first", "second")]
    for name, state in zip(("first", "second"), states, strict=True):
        check(state)
        assert state.run_id == f"{id_of(tmp_path)}-{name}"
        assert sorted((tmp_path / id_of(tmp_path) / name / "kernels").rglob("*.py"))
    with ExemplarStore.connect(tmp_path / id_of(tmp_path) / "store") as store:
        kept = store.top(TASKS[0].content_hash, "cpu", 100)
    assert {exemplar.origin.rpartition("-g")[0] for exemplar in kept if "/" in exemplar.origin} == {
        state.run_id for state in states
    }


@pytest.mark.parametrize("role", ["generator", "evaluator", "learner", "coordinator", "recorder"])
def test_a_run_goes_on_after_kill_9(tmp_path: Path, address: str, role: str) -> None:
    """The role's process is killed once while it works; the run ends as if nothing had happened, and no process
    is left."""
    killed: list[int] = []

    def act(folder: RunFolder, events: list[Event]) -> None:
        due = {
            "generator": lambda e: isinstance(e, GroupFormed) and e.group_id.endswith("g00002"),
            "learner": lambda e: isinstance(e, StepLearned),
        }.get(role, lambda e: isinstance(e, SampleLeft))
        if killed or not any(due(event) for event in events):
            return
        for pid in pids(folder, role):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    state = run(tmp_path, address, act)
    assert killed, "the role was never killed: the test proves nothing"
    check(state)
    for pid in killed:
        assert not Path(f"/proc/{pid}").exists()


def pids(folder: RunFolder, role: str) -> list[int]:
    """Processes of a role: stand-ins announce theirs by a file, the graph's actors are found by Ray's process title."""
    announced = [int(path.stem.rpartition("-")[2]) for path in folder.path.glob(f"{role}-*.pid")]
    if announced:
        return [pid for pid in announced if Path(f"/proc/{pid}").exists()]
    title = {"coordinator": "ray::CoordinatorActor", "recorder": "ray::RecorderActor"}[role]
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            if command.startswith(title) and descends(parent):
                found.append(int(entry.name))
    return found


def descends(pid: int) -> bool:
    """True for a descendant of this process: other runs on the machine are left alone."""
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


def marked(mark: str) -> list[int]:
    """Living processes that inherited an environment variable's value."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@contextmanager
def command_of_its_own(folder: Path, mark: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The run of `folder` in a process of its own with Ray of its own, and the file of its events."""
    code = (
        "import importlib.util, pathlib, sys\n"
        f"spec = importlib.util.spec_from_file_location('run_of_its_own', {__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['run_of_its_own'] = module\n"
        "spec.loader.exec_module(module)\n"
        "from ray import cloudpickle\n"
        "cloudpickle.register_pickle_by_value(module)\n"
        f"module.run(pathlib.Path({str(folder)!r}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(project_root()), "KONTRAST_TEST_MARK": mark}
    with (folder / "log").open("w") as log:
        command = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=log, stderr=log)
    try:
        yield command, folder / id_of(folder) / "events.jsonl"
    finally:
        command.kill()
        command.wait()


def wait_until_at_work(folder: Path, command: subprocess.Popen[bytes], events: Path) -> None:
    """At least one sample has left."""
    deadline = time.monotonic() + 120
    while not (events.is_file() and "sample_left" in events.read_text()):
        assert command.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, "the run did not begin"
        time.sleep(0.1)


def replayed(events: Path) -> RunState:
    """The run's state by its file of events."""
    return RunState.replay(event_from_dict(json.loads(line)) for line in events.read_text().splitlines())


def wait_until_gone(mark: str, limit_s: float = 60.0) -> None:
    """Waits until no process carries the mark."""
    deadline = time.monotonic() + limit_s
    while left := marked(mark):
        names = [Path(f"/proc/{pid}/cmdline").read_bytes()[:80] for pid in left if Path(f"/proc/{pid}").exists()]
        assert time.monotonic() < deadline, f"still alive: {names}"
        time.sleep(0.2)


def test_a_killed_command_leaves_nothing_and_is_resumed(tmp_path: Path) -> None:
    """kill -9 of the command itself takes Ray, the store's server and every actor with it; the same run goes on from
    its folder, and counts nothing twice."""
    mark = f"kontrast-{tmp_path.name}-{os.getpid()}"
    with command_of_its_own(tmp_path, mark) as (command, events):
        wait_until_at_work(tmp_path, command, events)
        assert len(marked(mark)) > 3
        command.kill()
        command.wait()
        wait_until_gone(mark)
        before = len(events.read_text().splitlines())
    with command_of_its_own(tmp_path, mark) as (command, events):
        assert command.wait(timeout=120) == 0, (tmp_path / "log").read_text()
        wait_until_gone(mark)
    state = replayed(events)
    check(state)
    assert state.incarnation == 2
    assert len(events.read_text().splitlines()) > before


def test_one_process_starts_one_cluster_after_the_other() -> None:
    """As a run of several stages does, with the token authentication that is Ray's default."""
    code = (
        "from deploy.config import load_config\n"
        "from deploy.graph.cluster import joined\n"
        "for number in range(2):\n"
        "    with joined(load_config('demo', [])) as ray:\n"
        "        print(number, ray.get(ray.remote(lambda: 5).remote()), flush=True)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    environment["PYTHONPATH"] = str(project_root())
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.split() == ["0", "5", "1", "5"], done.stderr


def test_sigterm_stops_in_order(tmp_path: Path) -> None:
    """What `ray job stop` sends: the run closes as stopped, both ledgers balance with nothing in flight, and no process
    is left."""
    mark = f"kontrast-{tmp_path.name}-{os.getpid()}"
    with command_of_its_own(tmp_path, mark) as (command, events):
        wait_until_at_work(tmp_path, command, events)
        command.terminate()
        assert command.wait(timeout=90) == 0, (tmp_path / "log").read_text()
        wait_until_gone(mark)
    state = replayed(events)
    assert state.closed == "stopped"
    state.ledger.check()
    assert state.ledger.samples.counts()["in_flight"] == 0


def test_the_stored_events_alone_give_the_same_ledgers(tmp_path: Path, address: str) -> None:
    state = run(tmp_path, address)
    with ExemplarStore.connect(tmp_path / id_of(tmp_path) / "store") as store:
        events = [event_from_dict(value) for value in RunStream(store, id_of(tmp_path)).events()]
    assert Ledger.replay(events).samples.counts() == state.ledger.samples.counts()
    assert sum(isinstance(event, CoordinatorStarted) for event in events) == 1
