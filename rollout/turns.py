"""The next turn of a conversation: what became of an answer goes back to the policy, which answers again.

Pure. A rejected answer brings its typed reason and, where it is the policy's honest mistake, the evaluator's sentence
and the compiler's text; an accepted one its measured speedup. The conversation keeps its token budget: texts are cut
first, then the earliest answers go; code that is shown is never cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.config import RolloutConfig
from rollout.prompt import fill, format_speedup, template
from rollout.tokenizer import Tokenizer
from tasks.records.evaluation import Evaluation
from tasks.records.group import Prompt

EXPLAINED = ("compile_error", "contract", "incorrect", "crash", "timeout")
"""Reasons whose evidence is told; of a cheat the policy learns the reason alone."""
TEXT_CHARS = (2000, 1000, 500, 250, 120, 0)
"""Lengths that texts are cut to, one after another, until the conversation fits."""

Answered = tuple[str, Evaluation]
"""An answer's text and what became of it."""


def next_turn(first: Prompt, history: Sequence[Answered], tokenizer: Tokenizer, config: RolloutConfig) -> Prompt:
    """The prompt of turn `len(history)` (from 0) after these answers, oldest first, to the first turn's prompt.

    Its id is the first prompt's. Where even one answer does not fit the budget, the first prompt is asked anew.
    """
    turn = len(history)
    limit = config.prompt.max_tokens + turn * (config.sampling.max_tokens + config.prompt.feedback_tokens)
    text = first.text
    for messages in _choices(first, history, config):
        rendered = tokenizer.render(messages)
        if tokenizer.count(rendered) <= limit:
            text = rendered
            break
    return first.model_copy(update={"text": text, "token_ids": tokenizer.encode(text), "turn": turn})


def feedback(evaluation: Evaluation, config: RolloutConfig, max_chars: int) -> str:
    """What the policy is told of an answer; evidence is cut to `max_chars` characters."""
    parts = template(config.prompt.template)
    measurement = evaluation.measurement
    if evaluation.outcome == "accepted" and measurement is not None:
        score = measurement.ci_low if measurement.protocol == "reward" else measurement.speedup
        return fill(parts["accepted"], speedup=format_speedup(score)).strip()
    reason = str(evaluation.reason or "unscored").replace("_", " ")
    return fill(parts["rejected"], reason=reason, text=_evidence(evaluation, max_chars)).strip()


def _choices(first: Prompt, history: Sequence[Answered], config: RolloutConfig) -> list[list[dict[str, str]]]:
    """Conversations from the fullest to the shortest."""
    start = [{"role": role, "content": content} for role, content in first.messages]
    found = []
    for dropped in range(len(history)):
        for chars in TEXT_CHARS:
            messages = list(start)
            for answer, evaluation in history[dropped:]:
                messages.append({"role": "assistant", "content": answer})
                messages.append({"role": "user", "content": feedback(evaluation, config, chars)})
            found.append(messages)
    return found


def _evidence(evaluation: Evaluation, max_chars: int) -> str:
    if evaluation.reason not in EXPLAINED:
        return ""
    compiler = evaluation.detail.get("compiler")
    text = compiler if isinstance(compiler, str) and compiler.strip() else evaluation.message
    text = cut(text.strip(), max_chars)
    return f"\n```\n{text}\n```" if text else ""


def cut(text: str, max_chars: int) -> str:
    """The text's beginning, whole lines where one fits: compilers say first what matters."""
    if len(text) <= max_chars:
        return text
    kept = text[:max_chars]
    whole, line_end, _ = kept.rpartition("\n")
    return whole if line_end else kept.rstrip()
