"""`kontrast evaluate --shapes`: one evaluation a row, what is printed of them, and files that cannot be used."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import evaluation
from deploy.cli.evaluation import Request, evaluate_batch, evaluate_one
from deploy.cli.shapes import read_shapes
from tasks.errors import UsageError
from tasks.records import Candidate, Evaluation, Measurement, Sweep, Task
from tasks.reference_source import task_from_source

TASK = textwrap.dedent("""
    import torch
    from torch import nn
    batch_size = 64
    dim = 256
    class Model(nn.Module):
        def forward(self, x):
            return x * 2 + x
    def get_inputs():
        return [torch.randn(batch_size, dim)]
    def get_init_inputs():
        return []
""")  # fmt: skip
GOOD = textwrap.dedent("""
    import torch
    from torch import nn
    class ModelNew(nn.Module):
        def forward(self, x):
            return x * 3
""")  # fmt: skip


class FakeJudge:
    """Twice as fast at `dim = 1024`, wrong at `dim = 7`, unscored at `dim = 8`."""

    def evaluate(self, task: Task, candidate: Candidate, *, seed: bytes | None = None) -> Evaluation:
        common: dict[str, Any] = {
            "step": "time", "task_id": task.id, "task_hash": task.content_hash,
            "candidate_hash": candidate.content_hash, "message": "What happened.",
        }  # fmt: skip
        if "dim = 7\n" in task.source:
            return Evaluation(outcome="rejected", reason="incorrect", detail={"seed": "ab" * 16}, **common)
        if "dim = 8\n" in task.source:
            return Evaluation(outcome="unscored", reason="device_fault", **common)
        speedup = 2.0 if "dim = 1024" in task.source else 0.5
        measured = Measurement(
            speedup=speedup, ci_low=speedup, ci_high=speedup, reference_ms=1.0, candidate_ms=1.0, pairs=20
        )
        return Evaluation(outcome="accepted", measurement=measured, **common)


@contextmanager
def _fake(device: str, settings: dict[str, Any]) -> Iterator[FakeJudge]:
    yield FakeJudge()


def _run(folder: Path, rows: str, *, as_json: bool = True, make: Any = _fake, **options: Any) -> int:
    (folder / "task.py").write_text(TASK)
    (folder / "good.py").write_text(GOOD)
    (folder / "shapes.jsonl").write_text(rows)
    request = Request(shapes=str(folder / "shapes.jsonl"), **options)
    return evaluate_one(request, str(folder / "task.py"), str(folder / "good.py"), as_json=as_json, make=make)


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ('{"dim": 1024}\n\n{}\n', 0),
        ('{"dim": 1024}\n{"dim": 7}\n', 1),
        ('{"dim": 8}\n{"dim": 1024}', 3),
        ('{"dim": 8}\n{"dim": 7}', 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst_shape_and_json_is_one_object(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], rows: str, code: int
) -> None:
    assert _run(tmp_path, rows) == code
    (line,) = capfd.readouterr().out.splitlines()
    sweep = Sweep.from_json(line)
    assert [json.dumps(one.shape) for one in sweep.evaluations] == [row for row in rows.splitlines() if row]


def test_the_panel_has_a_row_a_shape_with_mean_and_worst(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run(tmp_path, '{"dim": 1024}\n{}\n{"dim": 7}', as_json=False) == 1
    out = capfd.readouterr().out
    for part in ("dim=1024", "as written", "rejected: incorrect",
                 "geometric mean  1.00x over the 2 accepted of 3 shapes", "worst           0.500x at as written",
                 "dim=7: What happened."):  # fmt: skip
        assert part in out
    command = out.splitlines()[-1].split(": ", 1)[1]
    assert command.endswith(f"--shapes {tmp_path / 'shapes.jsonl'} --seed {'ab' * 16}")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("{", "not JSON"),
        ("16,1024", "not JSON"),
        ("[1]", "not an object"),
        ('{"dim": {"a": 1}}', "an object within"),
        ('{"dim": [{}]}', "an object within"),
        ('{"dim": 1, "dim": 2}', "dim is set twice"),
        ('{"dim": NaN}', "NaN is no number"),
        ('{"dims": 1}', "did you mean dim? it has batch_size, dim"),
        ('{"dim": "1024"}', "a whole number"),
        ('{"dim": 4, "batch_size": 4}\n{"batch_size": 4, "dim": 4}', "line 3 of"),
        ("\xff", "not JSON"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_before_anything_is_evaluated(tmp_path: Path, rows: str, says: str) -> None:
    path = tmp_path / "shapes.jsonl"
    path.write_bytes(b'{"dim": 2}\n' + rows.encode("latin-1"))
    with pytest.raises(UsageError, match=r"line [23] of .*shapes\.jsonl") as raised:
        read_shapes(path, task_from_source(TASK))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("where", ["absent.jsonl", ".", "empty.jsonl"])
def test_a_file_without_shapes_is_bad_usage(tmp_path: Path, where: str) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(UsageError):
        read_shapes(tmp_path / where, task_from_source(TASK))


def test_shapes_and_a_batch_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="--shapes"):
        evaluate_batch(Request(shapes="x.jsonl"), "y.jsonl", "")


def test_real_shapes_are_evaluated_with_their_sizes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = '{"batch_size": 16, "dim": 1024}\n{"dim": 4096}\n'
    assert _run(tmp_path, rows, make=evaluation.make_judge, protocol="reward") == 0
    sweep = Sweep.from_json(capfd.readouterr().out)
    sizes = [one.facts["outputs"][0]["leaves"][0]["shape"] for one in sweep.evaluations]
    assert sizes == [[16, 1024], [64, 4096]]
    assert len({one.task_hash for one in sweep.evaluations}) == 2
