"""Runs a candidate alone and again and again, for `ncu`, `nsys` and `perf` to look at: no sandbox, no check, no clock.

    python -m deploy.cli.replay TASK CANDIDATE --device cuda --calls 20

Invariant: on a CUDA device only the calls lie between the profiler's start and stop, each in an NVTX range; inputs,
precision and mode are those of an evaluation. The candidate's code runs with the user's rights: only for one's own.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from deploy.cli.evaluation import Request, read_candidate
from tasks.errors import KontrastError, UsageError
from tasks.records import Task
from tasks.shapes import reshaped

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
_WARM_CALLS = 3


@app.command()
def replay(
    task: Annotated[str, typer.Argument(help="As for kontrast evaluate.")],
    candidate: Annotated[str, typer.Argument(help="As for kontrast evaluate.")],
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:INDEX.")] = "cpu",
    dtype: Annotated[str, typer.Option("--dtype", help="fp32, fp16 or bf16.")] = "fp32",
    size: Annotated[str, typer.Option("--size", help="Size of procedural tasks, cpu or gpu.")] = "",
    kernelbench: Annotated[str, typer.Option("--kernelbench", help="Where KernelBench lies.")] = "",
    shape: Annotated[str, typer.Option("--shape", help='Constants of the task, such as {"dim": 1024}.')] = "{}",
    calls: Annotated[int, typer.Option("--calls", min=1, help="Calls of the model.")] = 20,
) -> None:
    """Call a candidate's model on a task's inputs, outside of the sandbox."""
    request = Request(device=device, dtype=dtype, size=size, kernelbench=kernelbench)
    chosen = reshaped(request.task(task), _shape(shape))
    run(chosen, read_candidate(candidate, chosen).source, device, calls)
    typer.echo(f"{calls} calls of {candidate} on {device}: run alone and unchecked, so no number of this is a speedup")


def _shape(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f'--shape is not JSON ({error}); give an object such as {{"dim": 1024}}') from error
    if not isinstance(value, dict):
        raise UsageError('--shape is not an object; give one such as {"dim": 1024}')
    return value


def run(task: Task, source: str, device: str, calls: int) -> None:
    """Calls the candidate's model on one draw of the task's inputs. Raises what the candidate raises."""
    import torch

    from evaluator.reference.reference import DTYPES
    from evaluator.reference.subject import map_tensors

    place, dtype = torch.device(device), DTYPES[task.precision]
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here: give --device cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place.index or 0)

    def cast(value: torch.Tensor) -> torch.Tensor:
        moved = value.detach().to(place)
        return moved.to(dtype) if moved.is_floating_point() else moved

    with tempfile.TemporaryDirectory() as folder:
        own, reference = _module(folder, "candidate", source), _module(folder, "reference", task.source)
        torch.manual_seed(0)
        model = own.ModelNew(*[map_tensors(value, cast) for value in reference.get_init_inputs()])
        model = model.to(place, dtype).train(task.mode != "eval")
        inputs = [map_tensors(value, cast) for value in reference.get_inputs()]
        with torch.no_grad():
            for _ in range(_WARM_CALLS):
                model(*inputs)
            if place.type == "cpu":
                for _ in range(calls):
                    model(*inputs)
                return
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            for number in range(calls):
                torch.cuda.nvtx.range_push(f"call {number}")
                model(*inputs)
                torch.cuda.nvtx.range_pop()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def _module(folder: str, name: str, source: str) -> ModuleType:
    """The source as a module with a file, which compilers of annotated functions read."""
    path = Path(folder) / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Entry point: an error from outside is one sentence and an exit code."""
    try:
        app(prog_name="python -m deploy.cli.replay")
    except KontrastError as error:
        typer.echo(f"replay: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
