"""`kontrast store`: what it prints and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.store import app
from exemplar_store import ExemplarStore
from exemplar_store.hacking_cases import HackingCases
from exemplar_store.pruning import owner_of_run, pin
from tasks.errors import UsageError
from tasks.records import Candidate, Exemplar, Measurement, Task

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "import torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x.sum()\n"
TASK = Task(id="procedural:row_norm/1", source=REFERENCE)


def exemplar(number: int, speedup: float) -> Exemplar:
    candidate = Candidate(source=f"class ModelNew:\n    number = {number}\n")
    return Exemplar(
        task_id=TASK.id, task_hash=TASK.content_hash, device_type="cpu", source=candidate.source,
        candidate_hash=candidate.content_hash, speedup=speedup, origin=f"run/{number}",
        measurement=Measurement(
            speedup=speedup, ci_low=speedup * 0.98, ci_high=speedup * 1.02, reference_ms=1.0, candidate_ms=1 / speedup,
            pairs=20,
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A store of its own: seven kernels of one task, one claim, the packaged hacking cases; its server stays up."""
    with tempfile.TemporaryDirectory(prefix="kontrast-test-") as name:
        path = Path(name) / "store"
        with ExemplarStore.connect(path) as store:
            store.put_task(TASK)
            store.insert_many(exemplar(number, 1.0 + number / 10) for number in range(7))
            HackingCases(store).seed()
            line = {
                "level_id": 1, "task_id": 2, "ref_code": REFERENCE, "custom_code": "class ModelNew: pass",
                "score_default": 50.0,
            }  # fmt: skip
            (Path(name) / "released.jsonl").write_text(json.dumps(line) + "\n")
            result = CliRunner().invoke(app, ["import", "--store", str(path), str(Path(name) / "released.jsonl")])
            assert result.output == "1 read: 1 claims new, 1 tasks known\n"
            yield path


def kontrast_store(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, [arguments[0], "--store", str(folder), *arguments[1:]])
    assert result.exit_code == 0, result.output
    return result.output


def test_stats(folder: Path) -> None:
    text = kontrast_store(folder, "stats")
    assert "exemplars       7 in 7 buckets" in text
    assert "claims          1 (imported, not measured here)" in text
    counted = json.loads(kontrast_store(folder, "stats", "--json"))
    assert counted["exemplars"] == {"cpu|fp32|sequential": 7}


def test_top_never_shows_a_claim(folder: Path) -> None:
    rows = [json.loads(line) for line in kontrast_store(folder, "top", TASK.id, "-n", "3", "--json").splitlines()]
    assert [row["speedup"] for row in rows] == [1.6, 1.5, 1.4]
    assert len(kontrast_store(folder, "top").splitlines()) == 1, "the best of the only task"
    assert kontrast_store(folder, "top", "--device-type", "H100") == "no exemplars\n"


def test_show_a_task_and_one_exemplar(folder: Path) -> None:
    text = kontrast_store(folder, "show", TASK.content_hash[:10])
    assert "[1.6, 1.7)" in text
    assert "50.0x claimed" in text
    best = exemplar(6, 1.6)
    assert best.source in kontrast_store(folder, "show", TASK.id, best.candidate_hash[:12])
    assert Exemplar.from_json(kontrast_store(folder, "show", TASK.id, best.candidate_hash, "--json")) == best


def test_export_import_verify_prune(folder: Path, tmp_path: Path) -> None:
    kontrast_store(folder, "export", str(tmp_path / "a.jsonl"))
    assert kontrast_store(folder, "export", "-") == (tmp_path / "a.jsonl").read_text()
    with ExemplarStore.connect(tmp_path / "copy"):
        copy = tmp_path / "copy"
        assert "7 exemplars" in kontrast_store(copy, "import", str(tmp_path / "a.jsonl"))
        assert kontrast_store(copy, "export", "-") == (tmp_path / "a.jsonl").read_text()
        last = kontrast_store(copy, "verify", "--sources").splitlines()[-1]
        assert last == "1 tasks, 7 exemplars, 0 evaluations, 1 claims, 0 groups: consistent"
        assert kontrast_store(copy, "prune", "--best", "1") == "0 exemplars removed\n"


def test_a_standard_output_that_is_full_is_one_sentence(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "deploy.cli.main", "store", "export", "--store", str(folder), "-"], cwd=ROOT,
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert run.returncode == 2
    assert "standard output cannot be written" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_forgotten_run_lets_go_of_its_kernels(folder: Path) -> None:
    with ExemplarStore.connect(folder) as store:
        pin(store, owner_of_run("run7"), [exemplar(0, 1.0)])
    assert kontrast_store(folder, "prune", "--forget", "run7") == "1 exemplars no longer held by run7\n"
    assert kontrast_store(folder, "prune", "--forget", "run7") == "0 exemplars no longer held by run7\n"


def test_verify_ends_with_1_and_names_the_difference(tmp_path: Path) -> None:
    with ExemplarStore.connect(tmp_path / "s") as store:
        store.insert(exemplar(1, 1.25))
        store.connection.call("HINCRBY", store.keys.task(TASK.content_hash, "stats"), "cpu|fp32|sequential|12|n", 1)
        result = CliRunner().invoke(app, ["verify", "--store", str(tmp_path / "s")])
    assert result.exit_code == 1
    assert "bucket 12 counts 2 exemplars" in result.output
    assert result.output.splitlines()[-1].endswith(": 1 differences")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["stats", "--store", "redis://127.0.0.1:1"], 1, "does not answer"),
        (["stats"], 2, "--store"),
        (["show", "nothing"], 2, "holds no store"),
        (["prune"], 2, "nothing to prune"),
        (["import", "/nowhere.jsonl"], 2, "neither a file"),
    ],
)
def test_bad_usage_is_one_sentence(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    if "--store" not in arguments and arguments != ["stats"]:
        arguments = [arguments[0], "--store", str(tmp_path / "s"), *arguments[1:]]
    run = subprocess.run(
        [sys.executable, "-m", "deploy.cli.main", "store", *arguments], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == code
    assert words in run.stderr
    assert "Traceback" not in run.stderr


def test_a_run_names_its_store_and_a_folder_without_one_is_refused(folder: Path, tmp_path: Path) -> None:
    """Looking makes nothing. The folder above a store is what a run is."""
    assert CliRunner().invoke(app, ["stats", "--store", str(folder.parent)]).exit_code == 0
    unknown = CliRunner().invoke(app, ["show", "--store", str(folder.parent), "nothing"])
    assert "knows no task nothing" in str(unknown.exception)
    for command in (["stats"], ["top"], ["verify"], ["show", "x"], ["export", str(tmp_path / "out.jsonl")]):
        result = CliRunner().invoke(app, [command[0], "--store", str(tmp_path / "none"), *command[1:]])
        assert isinstance(result.exception, UsageError)
        assert "holds no store" in str(result.exception)
    assert list(tmp_path.iterdir()) == []
