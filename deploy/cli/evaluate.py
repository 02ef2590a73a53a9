"""`kontrast evaluate`: an honest number for one kernel, or for a file of them."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.settings import SettingsCommand, settings_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_TASK = "A file in KernelBench's convention, kernelbench:LEVEL/PROBLEM or procedural:FAMILY/INDEX."
_CANDIDATE = "A file with `class ModelNew`, seed:NAME (a seed kernel of the task), or - for standard input."
_PROTOCOL = "sequential, reward (quick, as in training) or paper (CUDA-L1's rules)."
_SIZE = "Size of procedural tasks, cpu or gpu; by default the device's."
_KERNELBENCH = "Checkout, .jsonl or .parquet of KernelBench."
_SEED = "Draw inputs as an earlier evaluation did; printed with each rejection."
_CONTROL = "Measure the task's reference against itself this often, instead of a candidate."
_BATCH = 'File of lines {"id", "task", "candidate"}, each a path, an id or source text.'
_OUT = "Where --batch writes its lines; standard output without it."
_SHAPES = 'File of lines such as {"batch_size": 16, "dim": 1024}: values for the constants of the task\'s file.'
_AGAINST = "Another candidate: both are checked, then timed in pairs with each other instead of the reference."
_BASELINE = "How the timed reference runs: eager, compile (torch.compile) or graph (a CUDA graph; cuda only)."
_WATCH = "Evaluate again after each save of a file, one line each time, until Ctrl-C."
_VERBOSE = "Say on stderr what is done, with times; long waits are said without it."
_JSON = 'Print one JSON object and nothing else; for bad usage one with "error".'
_PROFILE = "Show where an accepted candidate's time goes, after the timing, and how to look deeper."


@app.command(cls=SettingsCommand)
def evaluate(
    context: typer.Context,
    task: Annotated[str, typer.Argument(help=_TASK, show_default=False)] = "",
    candidate: Annotated[str, typer.Argument(help=_CANDIDATE, show_default=False)] = "",
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:INDEX.")] = "cpu",
    protocol: Annotated[str, typer.Option("--protocol", help=_PROTOCOL)] = "sequential",
    rules: Annotated[str, typer.Option("--rules", help="What is accepted: strict, paper or any.")] = "strict",
    dtype: Annotated[str, typer.Option("--dtype", help="Precision of the task: fp32, fp16 or bf16.")] = "fp32",
    size: Annotated[str, typer.Option("--size", help=_SIZE, show_default=False)] = "",
    kernelbench: Annotated[str, typer.Option("--kernelbench", help=_KERNELBENCH, show_default=False)] = "",
    seed: Annotated[str, typer.Option("--seed", help=_SEED, show_default=False)] = "",
    shapes: Annotated[str, typer.Option("--shapes", help=_SHAPES, show_default=False)] = "",
    against: Annotated[str, typer.Option("--against", help=_AGAINST, show_default=False)] = "",
    baseline: Annotated[str, typer.Option("--baseline", help=_BASELINE)] = "eager",
    watch: Annotated[bool, typer.Option("--watch", help=_WATCH)] = False,
    profile: Annotated[bool, typer.Option("--profile", help=_PROFILE)] = False,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help=_VERBOSE)] = False,
    control: Annotated[int, typer.Option("--control", min=0, help=_CONTROL)] = 0,
    batch: Annotated[str, typer.Option("--batch", help=_BATCH, show_default=False)] = "",
    out: Annotated[str, typer.Option("--out", help=_OUT, show_default=False)] = "",
    evaluators: Annotated[int, typer.Option("--evaluators", min=1, help="Evaluators for a --batch.")] = 1,
) -> None:
    """Judge a candidate against its reference: is it right on secret inputs, and how much faster is it?

    Any setting of the evaluator (docs/config.md) is given as --evaluator.key value, such as --evaluator.threads 2.

    Exit code 0: accepted (with --batch: every line got an evaluation). 1: rejected. 2: bad usage or unreadable input.
    3: unscored, since something of the machine failed and not the candidate, or since the one of --against was
    rejected. With --shapes it is that of the worst shape: rejected on any, else unscored on any. With --watch: 0 after
    Ctrl-C. With --control: 0, 1 when the evaluator is off by its own controls, 3 when none was measured.
    """
    from deploy.cli.evaluation import Request, evaluate_batch, evaluate_controls, evaluate_one
    from deploy.cli.main import log_to_stderr
    from tasks.errors import UsageError

    log_to_stderr(verbose=verbose)
    request = Request(
        device=device, protocol=protocol, rules=rules, dtype=dtype, size=size, kernelbench=kernelbench, seed=seed,
        evaluators=evaluators, shapes=shapes, against=against, baseline=baseline, profile=profile,
        settings_words=tuple(settings_of(context)),
    )  # fmt: skip
    if as_json and batch:
        raise UsageError("--json prints one object: leave it out with --batch, which prints one a line")
    if watch and (control or batch):
        raise UsageError("--watch watches one candidate: leave --batch and --control out")
    if control:
        if baseline != "eager" or profile:
            raise UsageError("--control times the reference against itself: leave --baseline and --profile out")
        stray = candidate or batch or out or seed or shapes or against
        raise typer.Exit(evaluate_controls(request, task, control, as_json=as_json, stray=stray))
    if batch:
        raise typer.Exit(evaluate_batch(request, batch, out, stray=task or candidate))
    raise typer.Exit(evaluate_one(request, task, candidate, as_json=as_json, out=out, watch=watch))


if __name__ == "__main__":
    app()
