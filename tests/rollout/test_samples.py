from __future__ import annotations

from rollout import render_completion, to_sample
from rollout.engines import Completion
from tasks.records import PolicyVersion, Prompt


def _completion(text: str, finish_reason: str) -> Completion:
    return Completion("run/7", 3, text, (1, 2), (-0.1, -0.2), (PolicyVersion(),), finish_reason)  # type: ignore[arg-type]


def test_a_readable_completion_becomes_a_candidate() -> None:
    sample = to_sample(_completion(render_completion("A.", "D.", "class ModelNew: ..."), "stop"))
    assert (sample.id, sample.prompt_id, sample.index) == ("run/7/3", "run/7", 3)
    assert sample.candidate is not None
    assert (sample.candidate.source, sample.candidate.origin) == ("class ModelNew: ...", "sample")
    assert sample.candidate.detail == sample.id
    assert (sample.token_ids, sample.logprobs) == ((1, 2), (-0.1, -0.2))


def test_code_cut_at_the_limit_is_no_candidate() -> None:
    text = render_completion("A.", "D.", "class ModelNew: ...").removesuffix("\n```")
    assert to_sample(_completion(text, "length")).candidate is None
    assert to_sample(_completion(text, "stop")).candidate is not None


def test_a_later_turn_carries_the_prompt_that_it_answers() -> None:
    completion = _completion("?", "stop")
    prompt = Prompt(
        id=completion.prompt_id, run_id="r", task_id="t", task_hash="h", device_type="cpu", text="", token_ids=(7, 8)
    )
    first, later = to_sample(completion, prompt), to_sample(completion, prompt.model_copy(update={"turn": 2}))
    assert (first.turn, first.prompt_token_ids) == (0, ())
    assert (later.turn, later.prompt_token_ids) == (2, (7, 8))
