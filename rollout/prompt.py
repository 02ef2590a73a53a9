"""The contrastive prompt: a task, earlier kernels with their measured speedups, and how to answer (CUDA-L1, section 3).

Pure but for its metrics, golden-tested. Exemplars are shown worst first. The prompt keeps a token budget, counted by
the tokenizer with the chat template applied: an exemplar that does not fit is swapped for a shorter one of its bucket,
then dropped, the worst first; code is never cut.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources

from rollout import metrics
from rollout.config import PromptConfig, RolloutConfig
from rollout.tokenizer import Tokenizer
from tasks.errors import KontrastError
from tasks.records.evaluation import Exemplar
from tasks.records.group import Prompt
from tasks.records.task import Task

MAX_ALTERNATIVES = 8
"""Shorter exemplars tried in place of one that does not fit."""
_PART = re.compile(r"^<!-- part: (.+?) -->\n", re.MULTILINE)
_TECHNIQUES = {"torch": "PyTorch", "c": "C and vectorization", "triton": "Triton", "cuda": "CUDA"}


class PromptTooLong(KontrastError):
    """The reference alone exceeds the token budget: the task is skipped and counted."""


def build_prompt(
    task: Task,
    exemplars: Sequence[Exemplar],
    tokenizer: Tokenizer,
    config: RolloutConfig,
    *,
    run_id: str,
    prompt_id: str,
    device_type: str,
    alternatives: Sequence[Sequence[Exemplar]] = (),
    strategy: str = "buckets",
) -> Prompt:
    """The prompt of one group.

    `alternatives[i]` are other exemplars of the bucket that `exemplars[i]` was drawn from. Raises PromptTooLong when
    the reference without any exemplar has more than `config.prompt.max_tokens` tokens.
    """
    shown, messages, tokens = _fit(task, exemplars, alternatives, tokenizer, config.prompt, device_type)
    text = tokenizer.render(messages)
    metrics.PROMPT_TOKENS.observe(tokens)
    metrics.PROMPT_EXEMPLARS.labels(str(len(shown)), str(len(exemplars))).inc()
    return Prompt(
        id=prompt_id,
        run_id=run_id,
        task_id=task.id,
        task_hash=task.content_hash,
        device_type=device_type,
        text=text,
        token_ids=tokenizer.encode(text),
        exemplar_hashes=tuple(exemplar.candidate_hash for exemplar in shown),
        exemplar_speedups=tuple(exemplar.speedup for exemplar in shown),
        strategy=strategy,
        turns=config.turns,
        messages=tuple((m["role"], m["content"]) for m in messages) if config.turns > 1 else (),
    )


def prompt_messages(
    task: Task, shown: Sequence[Exemplar], config: PromptConfig, device_type: str
) -> list[dict[str, str]]:
    """System and user message for exactly these exemplars, in this order."""
    parts = template(config.template)
    exemplars = "".join(
        fill(parts["exemplar"], number=str(number), speedup=format_speedup(one.speedup), source=one.source.strip("\n"))
        for number, one in enumerate(shown, start=1)
    )
    techniques = _TECHNIQUES[config.kernel_style]
    hint = parts[f"hint {config.kernel_style}"].strip()
    user = fill(
        parts["user"],
        reference=task.source.strip("\n"),
        exemplars=exemplars,
        hint=f"{hint} " if hint and config.template == "compact" else hint,
        questions=fill(parts["questions" if shown else "questions without exemplars"], techniques=techniques),
        device="CPU" if device_type == "cpu" else f"{device_type} GPU",
        below=(
            "are the reference module `Model` and earlier implementations of it, worst first"
            if shown
            else "is the reference module `Model`"
        ),
        compare=(
            " Compare the earlier implementations by their speedups, and use what you learn from the comparison."
            if len(shown) > 1
            else ""
        ),
    )
    return [{"role": "system", "content": parts["system"].strip()}, {"role": "user", "content": user.strip()}]


def format_speedup(speedup: float) -> str:
    """How a speedup is shown: two decimals, three significant digits below 0.1 (`0.0123x`)."""
    return f"{speedup:.2f}x" if speedup >= 0.1 else f"{speedup:.3g}x"


def _fit(
    task: Task,
    exemplars: Sequence[Exemplar],
    alternatives: Sequence[Sequence[Exemplar]],
    tokenizer: Tokenizer,
    config: PromptConfig,
    device_type: str,
) -> tuple[tuple[Exemplar, ...], list[dict[str, str]], int]:
    tokens = 0
    for shown in _selections(exemplars, alternatives):
        messages = prompt_messages(task, shown, config, device_type)
        tokens = tokenizer.count(tokenizer.render(messages))
        if tokens <= config.max_tokens:
            return shown, messages, tokens
    metrics.SKIPPED.labels("too_long").inc()
    raise PromptTooLong(
        f"the prompt of {task.id} has {tokens} tokens without any exemplar, more than rollout.prompt.max_tokens = "
        f"{config.max_tokens}: raise that limit, use the compact template, or leave the task out."
    )


def _selections(
    exemplars: Sequence[Exemplar], alternatives: Sequence[Sequence[Exemplar]]
) -> Iterator[tuple[Exemplar, ...]]:
    """What could be shown, best choice first: most exemplars, then fewest swaps, then dropping the worst, then longest.

    Worst first within each; never the same candidate twice; ends with nothing shown.
    """
    order = sorted(range(len(exemplars)), key=lambda i: (exemplars[i].speedup, exemplars[i].candidate_hash))
    options: list[list[Exemplar | None]] = []
    for i in order:
        drawn = exemplars[i]
        others = alternatives[i] if i < len(alternatives) else ()
        shorter = sorted((o for o in others if len(o.source) < len(drawn.source)), key=lambda o: -len(o.source))
        options.append([drawn, *_spread(shorter), None])

    def preference(choice: tuple[Exemplar | None, ...]) -> tuple[int, int, tuple[bool, ...], int]:
        dropped = tuple(one is None for one in choice)
        swapped = sum(one is not None and one is not first[0] for one, first in zip(choice, options, strict=True))
        return sum(dropped), swapped, dropped[::-1], -sum(len(one.source) for one in choice if one is not None)

    for choice in sorted(itertools.product(*options), key=preference):
        shown = [one for one in choice if one is not None]
        if len({one.candidate_hash for one in shown}) == len(shown):
            yield tuple(sorted(shown, key=lambda one: (one.speedup, one.candidate_hash)))


def _spread(shorter: Sequence[Exemplar]) -> Sequence[Exemplar]:
    """At most MAX_ALTERNATIVES of them, evenly over their lengths, the shortest always among them."""
    if len(shorter) <= MAX_ALTERNATIVES:
        return shorter
    last = len(shorter) - 1
    return [shorter[round(i * last / (MAX_ALTERNATIVES - 1))] for i in range(MAX_ALTERNATIVES)]


@cache
def template(name: str) -> dict[str, str]:
    """Parts of a template file, by name."""
    text = resources.files("rollout").joinpath("prompts", f"{name}.md").read_text(encoding="utf-8")
    pieces = _PART.split(text)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def fill(part: str, **slots: str) -> str:
    """A part of a template with its slots filled."""
    return string.Template(part).substitute(slots)
