"""Loading and listing tasks: what is found, what is refused, and that nothing of a task is run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tasks.errors import UsageError
from tasks.kernelbench import find_kernelbench, read_kernelbench
from tasks.reference_source import task_from_source
from tasks.suites import list_tasks, load_task

GOOD = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x + {n}
def get_inputs():
    return [torch.rand(4)]
def get_init_inputs():
    return []
"""
ROWS = [
    {
        "level": level,
        "problem_id": problem,
        "name": f"{problem}_Some_name",
        "code": GOOD.format(n=100 * level + problem),
    }
    for level in (1, 2)
    for problem in (1, 2, 10)
]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "kernelbench.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for row in ROWS:
        folder = tmp_path / "checkout" / "KernelBench" / f"level{row['level']}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{row['name']}.py").write_text(str(row["code"]))
        (folder / "README.md").write_text("not a task")
    return tmp_path / "checkout"


def test_checkout_jsonl_and_level_folders_hold_the_same_tasks(jsonl: Path, checkout: Path) -> None:
    assert read_kernelbench(jsonl) == read_kernelbench(checkout) == read_kernelbench(checkout / "KernelBench")
    task = load_task("kernelbench:2/10", kernelbench=checkout)
    assert (task.id, task.level, task.suite, task.name) == ("kernelbench:2/10", 2, "kernelbench", "10_Some_name")
    assert task == load_task("kernelbench:2/10", kernelbench=jsonl)


def test_parquet_holds_the_same_tasks(jsonl: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra `parquet`)")
    from pyarrow import parquet

    for level in (1, 2):
        table = pyarrow.Table.from_pylist([row for row in ROWS if row["level"] == level])
        parquet.write_table(table, tmp_path / f"level_{level}.parquet")
    assert read_kernelbench(tmp_path / "level_2.parquet") == read_kernelbench(jsonl)[3:]
    (tmp_path / "kernelbench.jsonl").unlink()
    assert len(read_kernelbench(tmp_path)) == 6
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UsageError, match=r"cannot read .*broken.parquet"):
        read_kernelbench(tmp_path / "broken.parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"needs pyarrow: install Kontrast's `parquet` extra"):
        read_kernelbench(tmp_path / "data.parquet")


def test_kernelbench_is_found_by_argument_then_variable_then_shared_folder(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KONTRAST_KERNELBENCH", raising=False)
    monkeypatch.delenv("KONTRAST_SHARED", raising=False)
    with pytest.raises(UsageError, match=r"KernelBench is not at hand: clone .* KONTRAST_KERNELBENCH"):
        find_kernelbench()
    (tmp_path / "shared" / "data").mkdir(parents=True)
    monkeypatch.setenv("KONTRAST_SHARED", str(tmp_path / "shared"))
    with pytest.raises(UsageError):
        find_kernelbench()
    in_shared = tmp_path / "shared" / "data" / "kernelbench.jsonl"
    in_shared.write_text("")
    assert find_kernelbench() == in_shared
    monkeypatch.setenv("KONTRAST_KERNELBENCH", str(jsonl))
    assert find_kernelbench() == jsonl
    assert find_kernelbench(tmp_path) == tmp_path
    with pytest.raises(UsageError, match="KernelBench is not at"):
        find_kernelbench(tmp_path / "gone")


def test_all_of_kernelbench_is_well_formed(shared_dir: Path) -> None:
    tasks = list_tasks("kernelbench", kernelbench=shared_dir / "data" / "kernelbench.jsonl")
    assert [sum(task.level == level for task in tasks) for level in (1, 2, 3, 4)] == [100, 100, 50, 20]
    assert len({task.content_hash for task in tasks}) == len({task.id for task in tasks}) == 270


@pytest.mark.parametrize(
    ("selector", "ids"),
    [
        ("kernelbench:1", ["kernelbench:1/1", "kernelbench:1/2", "kernelbench:1/10"]),
        ("kernelbench:1/1-2", ["kernelbench:1/1", "kernelbench:1/2"]),
        (
            "kernelbench:2/2,procedural:row_norm/0-1",
            ["kernelbench:2/2", "procedural:row_norm/0", "procedural:row_norm/1"],
        ),
        ("kernelbench:1/2, kernelbench:1/2", ["kernelbench:1/2"]),
    ],
)
def test_selectors(selector: str, ids: list[str], jsonl: Path) -> None:
    assert [task.id for task in list_tasks(selector, kernelbench=jsonl, size="cpu")] == ids


@pytest.mark.parametrize(
    ("ref", "text"),
    [
        ("kernelbench:9/999", "unknown task kernelbench:9/999: .* levels 1, 2"),
        ("kernelbench:1/3", "unknown task kernelbench:1/3: level 1 .* problems 1 to 10"),
        ("kernelbench:1", "names 3 tasks; give one"),
        ("kernelbench:one/1", "no KernelBench task"),
        ("kernelbench:1/2-1", "ends before it begins"),
        ("kernelbench", "names several tasks"),
        ("procedural:row_norm", "no procedural task"),
        ("procedural:row_norm/-1", "no procedural task"),
        ("procedural:nothing/1", "unknown procedural family 'nothing'"),
        ("procedural:row_norm/0-999999", "more than 100000 tasks"),
        ("no/such/file.py", "unknown task 'no/such/file.py': give a file, kernelbench:LEVEL/PROBLEM"),
        ("kernelbench2:1/1", "unknown task"),
        ("nul\0byte", "unknown task"),
        ("", "is a folder|unknown task"),
        ("x" * 5000, "unknown task"),
    ],
)
def test_unknown_references_are_one_sentence(ref: str, text: str, jsonl: Path) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        load_task(ref, kernelbench=jsonl, size="cpu")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_file_is_named_as_it_is_known_by_its_content_and_never_run(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    path = tmp_path / "task.py"
    path.write_text("\ufeff" + GOOD.format(n=1) + f"open({str(trap)!r}, 'w').close()\n")
    task = load_task(path)
    assert (task.id, task.name) == ("task.py", "task")
    assert not trap.exists()
    copy = tmp_path / "copy.py"
    copy.write_text("# a comment\n" + path.read_text(encoding="utf-8-sig"))
    assert load_task(str(copy)).id == "copy.py"
    assert load_task(str(copy)).content_hash == task.content_hash
    assert load_task(path, precision="bf16").content_hash != task.content_hash
    bare = task_from_source(task.source)
    assert bare.id == f"text:{task.content_hash[:12]}"
    assert bare.content_hash == task.content_hash


def test_a_folder_lists_its_tasks_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 9, 1):
        (tmp_path / f"{number}_task.py").write_text(GOOD.format(n=number))
    (tmp_path / "notes.txt").write_text("not a task")
    assert [task.name for task in list_tasks(tmp_path)] == ["1_task", "9_task", "10_task"]
    with pytest.raises(UsageError, match=r"holds no \.py files"):
        list_tasks(tmp_path.joinpath("empty").mkdir() or tmp_path / "empty")
    with pytest.raises(UsageError, match="is a folder"):
        load_task(tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty"),
        (b"\x7fELF\x00\x01\x02", "is binary"),
        (b"\xff\xfe\x41", "is binary"),
        (b"class Model(:\n", "does not parse: line 1"),
        (b"(" * 100_000, "does not parse"),
        (b"x = 1\n" * 300_000, "larger than"),
        (GOOD.replace("class Model", "class Modell").encode(), "has no Model; define"),
        (GOOD.replace("get_inputs", "make_inputs").encode(), "has no get_inputs; define"),
        (GOOD.replace("get_init_inputs", "nothing").encode(), "has no get_init_inputs; define"),
        (b"def f():\n    class Model: pass\n    get_inputs = get_init_inputs = 1\n", "has no Model"),
    ],
)
def test_ill_formed_tasks_are_one_sentence(content: bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=text) as caught:
        load_task(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "definition",
    ["if True:\n    from m import A as Model", "try:\n    Model = 1\nexcept E:\n    pass", "from m import *"],
)
def test_names_may_be_bound_in_any_way(definition: str, tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    path.write_text(f"{definition}\nget_inputs = get_init_inputs = lambda: []\n")
    assert load_task(path).suite == "file"


def test_a_pipe_and_an_unreadable_file_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        load_task(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        load_task("/dev/zero")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "line 7 is not JSON"),
        ("[1]", "row that is no object"),
        ('{"level": 1, "problem_id": "2", "name": "", "code": ""}', "without level, problem_id"),
        (json.dumps(ROWS[0]), "holds problem 1/1 twice"),
    ],
)
def test_ill_formed_rows_are_usage_errors(line: str, text: str, jsonl: Path) -> None:
    jsonl.write_text(jsonl.read_text() + line + "\n")
    with pytest.raises(UsageError, match=text):
        list_tasks("kernelbench:1", kernelbench=jsonl)


def test_an_ill_formed_problem_is_named_by_its_id(jsonl: Path) -> None:
    bad = {"level": 3, "problem_id": 1, "name": "x", "code": "x = 1"}
    jsonl.write_text(jsonl.read_text() + json.dumps(bad) + "\n")
    with pytest.raises(UsageError, match="kernelbench:3/1 is not a task: it has no Model"):
        list_tasks("kernelbench:3", kernelbench=jsonl)
    assert load_task("kernelbench:1/1", kernelbench=jsonl).level == 1
