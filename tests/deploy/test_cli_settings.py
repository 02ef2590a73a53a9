"""Settings of the evaluator on the command line of `kontrast evaluate`, as `kontrast train` takes those of a run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.evaluation import Request
from deploy.cli.settings import split_settings
from evaluator.config import EvaluatorConfig
from tasks.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("line", "settings", "others"),
    [
        ("--a.b 1 task kernel", "--a.b 1", "task kernel"),
        ("task --a.b=1 kernel --json", "--a.b=1", "task kernel --json"),
        ("task kernel --a.b --json", "--a.b", "task kernel --json"),
        ("task --a.b", "--a.b", "task"),
        ("task --shapes=my.jsonl -- --a.b 1", "", "task --shapes=my.jsonl -- --a.b 1"),
    ],
)
def test_settings_stand_anywhere_among_the_options(line: str, settings: str, others: str) -> None:
    assert split_settings(line.split()) == (settings.split(), others.split())


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (("--evaluator.threads", "2"), {"threads": 2}),
        (("--evaluator.timing.half-width=0.1",), {"timing": {"half_width": 0.1}}),
        (("--evaluator.sandbox.layers", "landlock,seccomp"), {"sandbox": {"layers": ("landlock", "seccomp")}}),
        (("--evaluator.rule", '{weights = "seeded"}'), {"rule": {"weights": "seeded"}}),
        (("--evaluator.protocol", "reward", "--evaluator.threads=1"), {"protocol": "reward", "threads": 1}),
    ],
)
def test_any_setting_of_the_evaluator_reaches_it(words: tuple[str, ...], settings: dict[str, Any]) -> None:
    request = Request(settings_words=words)
    assert EvaluatorConfig(**request.settings) == EvaluatorConfig(**settings)
    assert shlex.split(request.reproduce("t.py", "k.py", "ab"))[-len(words) :] == list(words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--evaluator.thraeds", "2"), "did you mean evaluator.threads?"),
        (("--evaluator.half_width", "2"), "did you mean evaluator.timing.half_width?"),
        (("--evaluatr.threads", "2"), "did you mean --evaluator.threads?"),
        (("--rollout.engine", "vllm"), "those of the evaluator only"),
        (("--evaluator.threads",), "--evaluator.threads needs a value"),
        (("--evaluator.threads", "two"), "evaluator.threads = 'two'"),
        (("--evaluator.rule", "{wieghts = 1}"), "there is no rule wieghts; there are own_work"),
        (("--evaluator.rule", '{weights = "x"}'), "weights: input should be 'loaded' or 'seeded'"),
    ],
)
def test_a_wrong_setting_is_one_sentence(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        Request(settings_words=words)
    assert says in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_an_option_and_a_setting_may_not_contradict_each_other() -> None:
    with pytest.raises(UsageError, match="give one of them"):
        Request(rules="paper", settings_words=("--evaluator.rules", "any"))
    assert Request(rules="any", settings_words=("--evaluator.rules", "any")).settings["rules"] == "any"


def test_from_the_command_line_a_setting_may_come_first(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli.main", "evaluate", "--evaluator.thread", "1", "absent.py", "k.py"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "kontrast: Configuration of kontrast evaluate: unknown key evaluator.thread (did you mean evaluator.threads?)."
    )
