"""From a completion to the sample that travels on."""

from __future__ import annotations

from rollout import metrics
from rollout.engines.base import Completion
from rollout.parse import parse_completion
from tasks.records.candidate import Candidate
from tasks.records.group import Prompt, Sample


def to_sample(completion: Completion, prompt: Prompt | None = None) -> Sample:
    """The record of one draw, with its candidate where code could be read; of a later turn with its `prompt`."""
    parsed = parse_completion(completion.text, cut=completion.finish_reason == "length")
    metrics.PARSED.labels(parsed.error or "none").inc()
    id_ = f"{completion.prompt_id}/{completion.index}"
    candidate = None
    if parsed.source is not None:
        candidate = Candidate(source=parsed.source, origin="sample", detail=id_)
    return Sample(
        id=id_,
        prompt_id=completion.prompt_id,
        index=completion.index,
        text=completion.text,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        policy_versions=completion.policy_versions,
        finish_reason=completion.finish_reason,
        candidate=candidate,
        turn=0 if prompt is None else prompt.turn,
        prompt_token_ids=prompt.token_ids if prompt is not None and prompt.turn else (),
    )
