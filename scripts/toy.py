"""A whole run in one process, with a toy in place of kernels: real coordinator, recorder, store, queue, engine, learner
and publication; a tiny Llama as policy; rewards by script.

Nothing here needs Ray or a device. What is scripted is named: the reward is a function of the completion's tokens, the
prompt is a task's token and the shown exemplars' tokens, and a completion is its own candidate.

Invariants: a run follows from its seeds; with `paced`, the learner waits until generation is as far ahead as the
staleness allows, so that the staleness of a run is the one asked for and not the machine's.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.config import Config, load_config
from deploy.folder import RunFolder
from deploy.graph.actors import RecorderActor
from deploy.graph.coordinator import Coordinator
from deploy.graph.generating import GeneratorActor
from deploy.graph.remote import remote_handles
from deploy.graph.run import run_plan
from deploy.graph.state import Group, RunState
from deploy.graph.tools import Rules, Seed, Tools
from exemplar_store import ExemplarStore, RunStream
from learner.actor import LearnerProcess
from learner.loop import Learned, Standing
from rollout.tokenizer import ChatTokenizer
from rollout.turns import next_turn
from tasks.integrity import check_integrity
from tasks.records import Candidate, Evaluation, Exemplar, Measurement, Prompt, Sample, ScoredGroup, Task

WORDS = 64
END = 2
"""Id of the token that ends an answer."""
Score = Callable[[Task, tuple[int, ...]], float | None]
"""Speedup of a completion's tokens on a task; None rejects it."""
BASE = [
    "--evaluator.pool.cpu", "1", "--evaluator.protocol", "sequential", "--run.seed_kernels", "none",
    "--run.confirm", "false", "--cluster.generator_gpus", "0", "--cluster.learner_gpus", "0", "--rollout.engine",
    "transformers", "--rollout.device", "cpu", "--rollout.dtype", "fp32", "--learner.device", "cpu",
    "--learner.policy.dtype", "fp32", "--learner.policy.lora_rank", "0", "--learner.policy.adapter", "",
    "--learner.checkpoint.every_steps", "100000", "--learner.reward.lower_end", "never",
]  # fmt: skip


def toy_config(source: str, settings: Sequence[str] = ()) -> Config:
    """A preset or file with what a toy run cannot do otherwise laid over it, then `settings`."""
    config = load_config(source, [*BASE, *settings])
    pool = dict.fromkeys(config.evaluator.pool, 0) | {"cpu": 1}
    return config.model_copy(update={"evaluator": config.evaluator.model_copy(update={"pool": pool})})


def toy_tasks(count: int) -> list[Task]:
    """Tasks whose number is what their prompt says."""
    return [Task(id=f"file:toy-{number}", source=f"class Model: number = {number}") for number in range(count)]


def number_of(task: Task) -> int:
    """The number of a toy task."""
    return int(task.id.rpartition("-")[2])


def model_config() -> Any:
    """Shape of the tiny policy."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip


def make_model(folder: Path, seed: int = 0) -> Path:
    """A tiny random Llama with a tokenizer of WORDS words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    LlamaForCausalLM(model_config()).save_pretrained(str(folder))
    words = Tokenizer(models.WordLevel({word(n): n for n in range(WORDS)}, unk_token=word(1)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=word(END), pad_token=word(END), unk_token=word(1)
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(str(folder))
    return folder


def word(token: int) -> str:
    """How a token is written; all words have one length, so that none begins with another."""
    return f"w{token:02d}"


def tokens_of(source: str) -> tuple[int, ...]:
    """Tokens of a toy candidate."""
    return tuple(int(word[1:]) for word in source.split("'")[1].split()) if "'" in source else ()


@dataclass
class ToyRun:
    """One run of a configuration on toy tasks."""

    config: Config
    folder: Path
    model: Path
    tasks: Sequence[Task]
    score: Score
    paced: bool = False
    shuffled: bool = False
    """The learner sees each group's outcomes on the wrong samples: nothing can be learned from them."""
    held_out: Mapping[str, Sequence[Task]] = field(default_factory=dict)
    seeds: Sequence[tuple[int, ...]] = ()
    """Completions that are known beforehand for every task, slowest first."""
    generator: type[ToyGenerator] | None = None
    """A generator that also looks at what passes."""

    def run(self) -> RunState:
        """Runs to the end."""
        return asyncio.run(self._run())

    async def _run(self) -> RunState:
        config, source = self._with_model(), check_integrity()
        run = RunFolder(self.folder).create()
        plan = run_plan(config, run.run_id, self.tasks, self.held_out)
        tasks = [*self.tasks, *(task for found in self.held_out.values() for task in found)]
        with ExemplarStore.connect(run.store, config.store) as store:
            location = store.url
            recorder = RecorderActor(
                run, location, config.store, {task.id: task for task in tasks}, self._tools,
                rules_of(config), source,
            )  # fmt: skip
            generator = (self.generator or ToyGenerator)(config.rollout, str(self.model), source)
            learner = PacedLearner(
                LearnerProcess(
                    config.learner, run.run_id, str(run.checkpoints), lambda: self._stream(location, run.run_id),
                    seed=config.run.seed,
                )
            )  # fmt: skip
            await generator.ready()
            stream = RunStream(ExemplarStore.connect(location, config.store), run.run_id)
            coordinator = Coordinator(plan, remote_handles(stream, Local(recorder), [Local(generator)], Local(learner)))
            if self.paced:
                learner.far_ahead = lambda: _far_ahead(coordinator)
            try:
                return await coordinator.run()
            finally:
                await learner.close()
                await generator.close()

    def _with_model(self) -> Config:
        config, folder = self.config, str(self.model)
        policy = config.learner.policy.model_copy(update={"model": folder})
        publish = config.learner.publish.model_copy(update={"folder": str(self.folder / "weights")})
        learner = config.learner.model_copy(update={"policy": policy, "publish": publish})
        rollout = config.rollout.model_copy(update={"model": folder})
        return config.model_copy(update={"learner": learner, "rollout": rollout})

    def _stream(self, location: str, run_id: str) -> RunStream:
        stream = RunStream(ExemplarStore.connect(location, self.config.store), run_id)
        return ShuffledStream(stream, self.config.run.seed) if self.shuffled else stream

    def _tools(self) -> Tools:
        async def evaluate(
            task: Task,
            candidate: Candidate,
            device_type: str,
            protocol: str,
            first: Evaluation | None = None,  # noqa: ARG001
        ) -> Evaluation:
            speedup = self.score(task, tokens_of(candidate.source))
            common: dict[str, Any] = {
                "task_id": task.id, "task_hash": task.content_hash, "candidate_hash": candidate.content_hash,
                "protocol": protocol, "step": "time", "device_type": device_type,
            }  # fmt: skip
            if speedup is None:
                return Evaluation(outcome="rejected", reason="incorrect", message="Wrong by script.", **common)
            timing = Measurement(
                speedup=speedup, ci_low=speedup * 0.99, ci_high=speedup * 1.01, reference_ms=speedup, candidate_ms=1.0,
                pairs=20, device_type=device_type,
            )  # fmt: skip
            return Evaluation(outcome="accepted", measurement=timing, **common)

        def seeds(task: Task) -> list[Seed]:  # noqa: ARG001
            return [Seed(f"seed-{n}", "middle", source_of(tokens)) for n, tokens in enumerate(self.seeds)]

        tokenizer = ChatTokenizer.load(self.model)
        return Tools(
            build_prompt, seeds, evaluate,
            build_turn=lambda first, history: next_turn(first, history, tokenizer, self.config.rollout),
        )  # fmt: skip


def rules_of(config: Config) -> Rules:
    """The recorder's rules, as a run has them."""
    return Rules(
        config.evaluator.protocol, config.evaluator.rules, seed=config.run.seed, confirm_above=1e9,
        evaluators=config.device_types(), keep_samples=config.run.keep_samples,
    )  # fmt: skip


def source_of(tokens: Sequence[int]) -> str:
    """The candidate of these tokens."""
    return f"answer = '{' '.join(map(word, tokens))}'"


def build_prompt(
    task: Task, exemplars: Sequence[Exemplar], mates: Any, group: Group,  # noqa: ARG001
) -> Prompt:  # fmt: skip
    """The task's number, then each exemplar's tokens behind a mark, slowest first."""
    ids = [3 + number_of(task)]
    for exemplar in exemplars:
        ids += [1, *tokens_of(exemplar.source)]
    text = " ".join(map(word, ids))
    return Prompt(
        id=group.id, run_id=group.id.rsplit("-g", 1)[0].rsplit("-h", 1)[0], task_id=task.id,
        task_hash=task.content_hash, device_type=group.device_type, text=text, token_ids=tuple(ids),
        exemplar_hashes=tuple(exemplar.candidate_hash for exemplar in exemplars),
        exemplar_speedups=tuple(exemplar.speedup for exemplar in exemplars),
        turns=group.turns, messages=(("user", text),) if group.turns > 1 else (),
    )  # fmt: skip


class ToyGenerator(GeneratorActor):
    """A generator whose completions are their own candidates."""

    async def generate(self, requests: Sequence[Any]) -> AsyncIterator[Sample]:
        """See Generator."""
        async for sample in super().generate(requests):
            tokens = [token for token in sample.token_ids if token != END]
            candidate = Candidate(source=source_of(tokens), origin="sample", detail=sample.id)
            yield sample.model_copy(update={"candidate": candidate})


class PacedLearner:
    """The learner's process, which may have to wait until generation is far ahead."""

    def __init__(self, process: LearnerProcess) -> None:
        self._process = process
        self.far_ahead: Callable[[], bool] = lambda: True

    async def standing(self) -> Standing:
        """See LearnerProcess."""
        return await self._process.standing()

    async def learn(self, *, partial: bool = False) -> Learned:
        """See LearnerProcess."""
        while not self.far_ahead():
            await asyncio.sleep(0.001)
        return await self._process.learn(partial=partial)

    async def publish(self, generators: Sequence[Any]) -> Any:
        """See LearnerProcess."""
        return await self._process.publish(generators)

    async def checkpoint(self) -> None:
        """See LearnerProcess."""
        await self._process.checkpoint()

    async def close(self) -> None:
        """Frees the trainer."""
        await self._process.close()


def _far_ahead(coordinator: Coordinator) -> bool:
    """True when every group that may be formed is formed and whole."""
    state, plan = coordinator.state, coordinator.plan
    alive, in_progress = state.alive_groups(), state.groups_in_progress()
    enough = alive >= plan.steps * plan.groups_per_step
    return in_progress == 0 and (enough or plan.capacity(state.step, alive, in_progress) == 0)


class ShuffledStream(RunStream):
    """A run's stream that gives each group's outcomes to the wrong samples."""

    def __init__(self, stream: RunStream, seed: int) -> None:
        super().__init__(stream.store, stream.run_id)
        self._seed = seed

    def read_scored(self, consumer: str, count: int, block_ms: int) -> list[tuple[str, ScoredGroup]]:
        """See RunStream."""
        return [(entry, self._shuffle(group)) for entry, group in super().read_scored(consumer, count, block_ms)]

    def _shuffle(self, group: ScoredGroup) -> ScoredGroup:
        order = list(group.samples)
        random.Random(f"{self._seed}/{group.id}").shuffle(order)
        samples = tuple(
            own.model_copy(update={"evaluation": other.evaluation, "copy_of": other.copy_of})
            for own, other in zip(group.samples, order, strict=True)
        )
        return group.model_copy(update={"samples": samples})


class Local:
    """An object with the face of a Ray actor, for `deploy.graph.remote`."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> LocalMethod:
        return LocalMethod(getattr(self._target, name))


class LocalMethod:
    """A method of such an object: futures in its arguments are awaited, streams give futures."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def options(self, **_: Any) -> LocalMethod:
        """Nothing to set."""
        return self

    def remote(self, *arguments: Any, **named: Any) -> Any:
        """A future of the answer, or a stream of futures."""
        if inspect.isasyncgenfunction(self._call):
            return self._stream(arguments, named)
        return asyncio.ensure_future(self._answer(arguments, named))

    async def _answer(self, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        answer = self._call(*[await one if isinstance(one, asyncio.Future) else one for one in arguments], **named)
        return await answer if inspect.isawaitable(answer) else answer

    async def _stream(self, arguments: Sequence[Any], named: dict[str, Any]) -> AsyncIterator[Any]:
        ready = [await one if isinstance(one, asyncio.Future) else one for one in arguments]
        async for item in self._call(*ready, **named):
            future = asyncio.get_running_loop().create_future()
            future.set_result(item)
            yield future


def rewards_by_step(state: RunState) -> list[float]:
    """Mean reward of each step's samples, oldest first."""
    return [event.metrics["reward_mean"] for event in state.steps]


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Writes JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))
