"""An engine of one's own: kernels from a list instead of a model, through prompt, parser and evaluator.

    python examples/own_engine.py

Any source of text fits behind `rollout.engines.base.Engine`: a service, a search, a person. What a coordinator needs of
it is that each requested sample leaves exactly once, and that it says under which policy version.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from evaluator import Evaluator, EvaluatorConfig
from rollout import RolloutConfig, build_prompt, render_completion, to_sample
from rollout.engines.base import Completion, Engine, GenerationRequest, WeightSource
from rollout.tokenizer import PlainTokenizer
from tasks.errors import UsageError
from tasks.figures import times
from tasks.records import PolicyVersion
from tasks.suites import load_task

TASK = Path(__file__).parent / "suite" / "center_rows.py"

IDEAS = (
    ("`mean` replaces the sum and the division.", "x - x.mean(dim=1, keepdim=True)"),
    ("Wrong: it forgets the division.", "x - x.sum(dim=1, keepdim=True)"),
    ("The variance's routine returns the mean as well.", "x - torch.var_mean(x, dim=1, keepdim=True)[1]"),
)


class ListEngine(Engine):
    """Hands out prepared answers in turn; it has no weights to update."""

    name = "list"

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers = itertools.cycle(answers)

    @property
    def policy_version(self) -> PolicyVersion:
        return PolicyVersion()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        for request in requests:
            for index in request.indices:
                yield Completion(
                    prompt_id=request.prompt.id, index=index, text=next(self._answers), token_ids=(), logprobs=(),
                    policy_versions=(), finish_reason="stop",
                )  # fmt: skip

    async def begin_update(self) -> None:
        return None

    async def load_weights(self, source: WeightSource) -> None:  # noqa: ARG002
        raise UsageError(f"the engine {self.name} has no weights to load: use it where nothing is trained")

    async def finish_update(self, version: PolicyVersion) -> None:  # noqa: ARG002
        return None

    async def sleep(self) -> None:
        return None

    async def wake(self) -> None:
        return None

    async def close(self) -> None:
        return None


def answer(idea: str, expression: str) -> str:
    """An answer in the form that the prompt asks for."""
    source = (
        "import torch\nfrom torch import nn\n\n\nclass ModelNew(nn.Module):\n"
        f"    def forward(self, x):\n        return {expression}\n"
    )
    return render_completion("The reference makes three passes over memory.", idea, source)


async def main() -> None:
    task = load_task(TASK)
    prompt = build_prompt(
        task, (), PlainTokenizer(), RolloutConfig(), run_id="example", prompt_id="example/0", device_type="cpu"
    )
    print(prompt.text)
    engine = ListEngine([answer(*idea) for idea in IDEAS])
    with Evaluator("cpu", EvaluatorConfig(protocol="reward")) as evaluator:
        async for completion in engine.generate([GenerationRequest(prompt, tuple(range(len(IDEAS))))]):
            sample = to_sample(completion)
            if sample.candidate is None:
                print(f"{sample.id}: no code in the answer")
                continue
            evaluation = evaluator.evaluate(task, sample.candidate)
            measured = evaluation.measurement
            speed = f" {times(measured.speedup)}" if measured is not None else ""
            print(f"{sample.id}: {evaluation.outcome}{speed} {evaluation.message}")
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
