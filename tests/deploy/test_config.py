"""The whole tree: presets, contradictions, round trip."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli.session import read_tasks
from deploy.config import Config, RunConfig, load_config
from deploy.graph.cluster import requests_of
from deploy.resolve import ConfigError, preset_names, walk
from evaluator.config import EvaluatorConfig


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid_and_reads_back(tmp_path: Path, name: str) -> None:
    config = load_config(name)
    (tmp_path / "config.toml").write_text(config.to_toml())
    again = load_config(str(tmp_path / "config.toml"))
    assert again == config
    assert again.digest() == config.digest()


def test_the_presets_are_the_three_promised() -> None:
    assert preset_names() == ["cluster", "demo", "one-gpu"]


def test_a_file_on_a_preset_says_only_what_differs(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "demo"\n[learner]\nsteps = 5\n')
    mine, demo = load_config(str(tmp_path / "mine.toml")), load_config("demo")
    assert mine.learner.steps == 5
    assert mine.rollout == demo.rollout


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (["--learner.temperature", "0.7"], ("rollout.sampling.temperature", "learner.temperature")),
        (["--rollout.staleness.max_staleness", "9"], ("rollout.staleness.max_staleness", "learner.grpo.max_staleness")),
        (
            ["--learner.stage", "self_supervised", "--rollout.staleness.max_staleness", "9"],
            ("rollout.staleness.max_staleness", "learner.self_supervised.max_staleness"),
        ),
        (["--rollout.sampling.group_size", "1"], ("rollout.sampling.group_size",)),
        (["--learner.policy.model", "other"], ("learner.policy.model", "rollout.model")),
        (["--evaluator.pool.H100", "1", "--cluster.evaluator_gpus", "0.5"], ("cluster.evaluator_gpus", "take_turns")),
        (["--learner.stage", "frozen", "--cluster.learner_ranks", "2"], ("learner.stage", "cluster.learner_ranks")),
        (["--held_out.eval_every", "2"], ("held_out.eval_every", "held_out.sets")),
        (["--review.mode", "advisory"], ("review.openai.base_url", "review.openai.model")),
        (["--review.mode", "binding", "--review.engine", "vllm"], ("review.engine", "review.model")),
        (
            [
                "--review.mode",
                "binding",
                "--review.engine",
                "vllm",
                "--review.model",
                "m",
                "--cluster.take_turns",
                "true",
            ],
            ("review.engine", "cluster.take_turns"),
        ),
        (["--run.max_groups", "1", "--learner.grpo.groups_per_step", "2"], ("run.max_groups", "groups_per_step")),
    ],
)
def test_a_contradiction_names_both_keys(settings: list[str], keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("cluster", settings)
    for key in keys:
        assert key in str(caught.value)


def test_a_reviewer_is_off_by_default_and_asks_for_its_place_when_on() -> None:
    assert load_config("cluster").review.mode == "off"
    assert "reviewer" not in {request.role for request in requests_of(load_config("cluster"))}
    settings = ["--review.mode", "advisory", "--review.engine", "vllm", "--review.model", "m", "--review.gpus", "1"]
    config = load_config("cluster", [*settings, "--review.max_tokens", "99"])
    (wanted,) = [request for request in requests_of(config) if request.role == "reviewer"]
    assert (wanted.count, wanted.cpus, wanted.gpus) == (1, 0.0, 1.0)
    engine = config.review.rollout()
    assert (engine.engine, engine.model, engine.sampling.max_tokens, engine.sampling.temperature) == (
        "vllm", "m", 99, 0.2,
    )  # fmt: skip


def test_every_key_is_documented() -> None:
    missing = [name for name, field in walk(Config) if not field.description]
    assert missing == []


def test_every_task_of_a_run_has_an_id_of_its_own(tmp_path: Path) -> None:
    """Files are named as they are called: two contents under one name differ in their ids, one content comes once."""
    source = "def get_inputs(): return []\ndef get_init_inputs(): return []\nclass Model: {}\n"
    for folder, body in (("a", "x = 1"), ("b", "x = 2"), ("c", "x = 1")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "softmax.py").write_text(source.format(body))
    (tmp_path / "a" / "relu.py").write_text(source.format("x = 3"))
    folders = tuple(str(tmp_path / folder) for folder in "abc")
    config = Config(run=RunConfig(tasks=folders), evaluator=EvaluatorConfig(pool={"cpu": 1}))
    tasks = read_tasks(config)
    assert [task.id.partition("~")[0] for task in tasks] == ["relu.py", "softmax.py", "softmax.py"]
    assert len({task.id for task in tasks}) == len({task.content_hash for task in tasks}) == 3
    assert tasks == read_tasks(config), "a resumed run knows them again"
