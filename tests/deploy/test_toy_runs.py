"""Whole runs in one process on a tiny policy with scripted rewards: real coordinator, store, queue, engine, learner and
publication (see scripts/toy.py)."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.config import load_config
from deploy.graph.state import RunState
from exemplar_store import ExemplarStore
from tasks.records import Task

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).resolve().parents[2]


def _script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


toy = _script("toy")

ABLATION = sorted((ROOT / "examples" / "ablation").glob("*.toml"))
SMALL = [
    "--learner.steps", "3", "--learner.grpo.groups_per_step", "2", "--learner.self_supervised.groups_per_step", "2",
    "--rollout.sampling.group_size", "4", "--rollout.sampling.max_tokens", "4", "--cluster.take_turns", "true",
    "--rollout.staleness.max_staleness", "0", "--learner.grpo.zero_variance", "keep", "--run.max_groups", "0",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_model(tmp_path_factory.mktemp("toy"))


def run(folder: Path, model: Path, source: str, settings: Sequence[str] = (), **kinds: Any) -> RunState:
    config = toy.toy_config(source, [*SMALL, *settings])
    kinds = {"tasks": toy.toy_tasks(2), "score": _script("tiny_policy").odd_share, **kinds}
    state = toy.ToyRun(config, folder / "r-1", model, **kinds).run()
    state.ledger.check()
    assert state.closed == "finished"
    return state


def test_the_ablation_is_five_configurations_that_differ_in_one_thing_each() -> None:
    assert [path.stem for path in ABLATION] == ["buckets", "evolve", "islands", "none", "random"]
    trees = {path.stem: load_config(str(path)).model_dump(mode="json", by_alias=True) for path in ABLATION}
    plain = trees["buckets"]
    for name, tree in trees.items():
        differing = {key for key in tree if tree[key] != plain[key]} - {"run"}
        assert differing == {"buckets": set(), "evolve": {"learner"}}.get(name, {"store"})
        assert tree["run"] == {**plain["run"], "name": f"ablation-{name}"}


@pytest.mark.parametrize("path", ABLATION, ids=lambda path: path.stem)
def test_every_arm_of_the_ablation_runs(tmp_path: Path, model: Path, path: Path) -> None:
    """3 steps of 2 groups of 4 samples from every configuration; the arms show exemplars as they say, and all but the
    search change the policy."""
    seeds = [(4, 6, 8), (4, 6, 9), (4, 7, 9)]
    state = run(tmp_path, model, str(path), ["--run.seed_kernels", "all"], seeds=seeds)
    assert state.step == 3
    assert state.ledger.samples.counts()["dispatched"] == 24
    word = "measured" if path.stem == "evolve" else "trained"
    assert state.ledger.groups.counts()[word] == 6
    with ExemplarStore.connect(tmp_path / "r-1" / "store", toy.toy_config(str(path)).store) as store:
        strategy = store.config.strategy
        assert len(store.top(toy.toy_tasks(1)[0].content_hash, "cpu", 99)) > len(seeds)
    assert strategy == {"evolve": "buckets"}.get(path.stem, path.stem)
    shown = {event.edit_distance is not None for event in state.left.values()}
    assert shown == ({False} if path.stem == "none" else {True})
    gradients = [event.metrics.get("gradient_norm", 0.0) > 0 for event in state.steps]
    assert gradients == [path.stem != "evolve"] * 3
    same = weights_of(tmp_path / "r-1") == weights_of_model(model)
    assert same == (path.stem == "evolve")


def weights_of(folder: Path) -> dict[str, float]:
    """A sum over each tensor that was published last."""
    from safetensors.torch import load_file

    newest = max((folder / "weights").rglob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    return {name: float(tensor.double().sum()) for name, tensor in load_file(newest).items()}


def weights_of_model(model: Path) -> dict[str, float]:
    from safetensors.torch import load_file

    return {name: float(t.double().sum()) for name, t in load_file(model / "model.safetensors").items()}


def test_stage_2_raises_the_accepted_share_through_the_real_queue(tmp_path: Path, model: Path) -> None:
    """Accepted is what holds no token of the upper half, about 1 in 16 of the first answers; speed plays no part."""

    def lower_half(task: Task, tokens: tuple[int, ...]) -> float | None:
        return 1.0 if tokens and max(tokens) < 32 else None

    settings = [
        "--learner.stage", "self_supervised", "--learner.steps", "16", "--learner.self_supervised.groups_per_step", "4",
        "--rollout.sampling.group_size", "8", "--learner.optimizer.learning_rate", "1e-2", "--store.strategy", "none",
    ]  # fmt: skip
    state = run(tmp_path, model, "demo", settings, score=lower_half)
    shares = [event.metrics["accepted_share"] for event in state.steps]
    assert sum(shares[:4]) / 4 < 0.3
    assert sum(shares[-4:]) / 4 > 0.7
    assert all(0 < event.metrics["kept_share"] == event.metrics["accepted_share"] for event in state.steps)
    assert state.stage == "self_supervised"


def test_two_turns_through_the_real_queue(tmp_path: Path, model: Path) -> None:
    """Each second turn is drawn from a prompt that continues the first one's with its own answer, both are trained on,
    and the run learns: the last steps pay more than the first in both turns."""
    settings = [
        "--rollout.turns", "2", "--learner.steps", "20", "--learner.grpo.groups_per_step", "4",
        "--rollout.sampling.group_size", "8", "--learner.optimizer.learning_rate", "1e-2", "--store.strategy", "none",
    ]  # fmt: skip
    seen: dict[str, Any] = {}

    class Watched(toy.ToyGenerator):  # type: ignore[misc, name-defined]
        async def generate(self, requests: Sequence[Any]) -> Any:
            async for sample in super().generate(requests):
                seen[sample.id] = sample
                yield sample

    state = run(tmp_path, model, "demo", settings, generator=Watched)
    assert state.ledger.samples.counts()["dispatched"] == 20 * 4 * 8 * 2
    assert state.ledger.groups.counts()["trained"] == 80
    for name, sample in seen.items():
        group, _, index = name.rpartition("/")
        if int(index) < 8:
            assert sample.prompt_token_ids == ()
            continue
        before = seen[f"{group}/{int(index) - 8}"]
        answer = tuple(token for token in before.token_ids if token not in (1, toy.END))
        assert sample.turn == 1
        assert sample.prompt_token_ids[1 : 1 + len(answer)] == answer
        assert len(sample.prompt_token_ids) > 1 + len(answer), "what became of it follows"
    for turn in (0, 1):
        paid = [event.metrics[f"reward_mean_turn_{turn}"] for event in state.steps]
        assert sum(paid[-5:]) > sum(paid[:5]) + 0.5


def test_held_out_sets_through_the_real_queue(tmp_path: Path, model: Path) -> None:
    """Plain GRPO, measured with and without exemplars on tasks that it never trains on: the prompts are the same at
    every step, the exemplars those tasks' seeds alone, and what was learned carries over."""
    tasks = toy.toy_tasks(6)
    settings = [
        "--held_out.eval_every", "8", "--held_out.sets.new", "said in the run", "--held_out.samples", "8",
        "--held_out.prompts", "both", "--run.seed_kernels", "all", "--store.strategy", "none", "--learner.steps", "20",
        "--learner.grpo.groups_per_step", "4", "--rollout.sampling.group_size", "8", "--learner.checkpoint.every_steps",
        "10", "--learner.optimizer.learning_rate", "1e-2",
    ]  # fmt: skip
    asked: dict[str, Any] = {}

    class Watched(toy.ToyGenerator):  # type: ignore[misc, name-defined]
        async def generate(self, requests: Sequence[Any]) -> Any:
            asked.update({request.prompt.id: request.prompt for request in requests})
            async for sample in super().generate(requests):
                yield sample

    seeds = [(4, 6, 8), (4, 6, 9), (4, 7, 9), (5, 7, 9)]
    state = run(
        tmp_path, model, "demo", settings, tasks=tasks[:2], held_out={"new": tasks[3:5]}, seeds=seeds,
        generator=Watched,
    )  # fmt: skip
    assert [key[0] for key in state.held_out] == [0, 0, 8, 8, 16, 16, 20, 20]
    assert state.ledger.groups.counts()["measured"] == 4 * 4
    by_prompt: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for prompt in asked.values():
        if prompt.held_out:
            by_prompt.setdefault((prompt.task_id, len(prompt.exemplar_hashes)), set()).add(prompt.token_ids)
        else:
            assert prompt.exemplar_hashes == ()
    assert {key: len(prompts) for key, prompts in by_prompt.items()} == {
        (task.id, shown): 1 for task in tasks[3:5] for shown in (0, 2)
    }
    with ExemplarStore.connect(tmp_path / "r-1" / "store") as store:
        for task in tasks[3:5]:
            assert len(store.top(task.content_hash, "cpu", 99)) == len(seeds)
        assert len(store.top(tasks[0].content_hash, "cpu", 999)) > len(seeds)
    for shown in (True, False):
        first, last = (state.held_out[step, "new", "cpu", shown] for step in (0, 20))
        assert last.mean_log_speedup > first.mean_log_speedup + 0.1
        assert (first.prompts, first.samples) == (2, 16)


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_bandit_has_the_staleness_that_it_was_asked_for(tmp_path: Path, staleness: int) -> None:
    """The first groups are of the first weights; from then on every step is as stale as it may be. The expectation is
    the policy's own: nearly uniform over the 63 arms before it has learned anything."""
    bandit = _script("bandit")
    lines = bandit.run(tmp_path, staleness, "truncated", 0, steps=6)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["staleness_max"] for line in lines] == [min(step, staleness) for step in range(6)]
    mean = statistics.mean(bandit.payoff(toy.toy_tasks(1)[0], (arm,)) for arm in bandit.ARMS)
    assert lines[0]["expectation"] == pytest.approx(mean, abs=0.1)
    assert (max(line["mismatch_kl"] for line in lines) > 1e-4) == (staleness > 0)
    toy.write_lines(tmp_path / "bandit.jsonl", lines)
    runs = bandit.read_runs(tmp_path / "bandit.jsonl")
    assert runs == {(staleness, "truncated"): [lines]}
    assert bandit.table(runs, 6)[-1].startswith(f"| {staleness} | truncated | {staleness} | never | never in 6 |")


def test_a_tiny_policy_learns_from_its_rewards_and_not_from_shuffled_ones(tmp_path: Path, model: Path) -> None:
    """Five seeds; scripted reward, the share of odd tokens. With each group's outcomes given to the wrong samples
    the same run must not earn more in the end than in the beginning."""
    tiny = _script("tiny_policy")
    found = {}
    for shuffled in (False, True):
        rewards = tiny.rewards_of(tmp_path / str(shuffled), model, shuffled=shuffled)
        found[shuffled] = tiny.interval([tiny.gain(one) for one in rewards])
    assert found[False][0] > 0.1
    assert found[True][0] <= 0.0
