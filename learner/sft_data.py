"""Stage 1's data: prompts and completions from procedural tasks and their verified seed kernels.

Invariants: everything follows from the seed, pair by pair, so a prefix of a longer set is the shorter set; only tasks
of the `train` split are used; families have equal shares, and within each the classes of speed (slow, middle, fast) it
can show within the token limits, so that speed is left for reinforcement learning to teach; a target is never among the
exemplars its prompt shows.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from learner.batch import TokenSequence
from learner.config import SftDataConfig
from tasks.errors import UsageError
from tasks.records import Exemplar, Measurement, Prompt, Task
from tasks.records.base import digest

SPEEDS = ("slow", "middle", "fast")
TYPICAL_SPEEDUPS = {"slow": 0.9, "middle": 1.5, "fast": 2.5}
"""Median score shown for a seed of each class where it was not measured."""
ADJECTIVES = {"slow": "slow", "middle": "fair", "fast": "fast"}
SPREAD = 0.2
"""Standard deviation of the logarithm of a drawn score."""
ATTEMPTS = 12
"""Tasks of a family drawn for one class of speed before another class is taken."""


@dataclass(frozen=True)
class PairSource:
    """What pairs are made with; `default_source` takes it from `tasks` and `rollout`."""

    families: tuple[str, ...]
    generate: Callable[[str, int], Task]
    seed_kernels: Callable[[Task], Sequence[Any]]
    """Seeds with `name`, `style`, `speed`, `reason`, `source`, `parameters`."""
    split_of: Callable[[Task], str]
    build_prompt: Callable[[Task, Sequence[Exemplar], str], Prompt]
    """From task, exemplars and kernel style to a prompt, with `token_ids`; raises `too_long`."""
    render_completion: Callable[[str, str, str], str]
    encode: Callable[[str], tuple[int, ...]]
    """Token ids of a completion, with the token that ends an answer."""
    too_long: type[Exception]
    max_completion_tokens: int


@dataclass(frozen=True)
class SftPair:
    """One supervised example."""

    sequence: TokenSequence
    task_id: str
    composition: tuple[str, ...]
    seed_name: str
    speed: str
    exemplars: int


def default_source(
    tokenizer: Any, config: SftDataConfig, *, max_prompt_tokens: int, max_completion_tokens: int,
    template: str = "compact",
) -> PairSource:  # fmt: skip
    """Tasks and seeds of the procedural suite, prompts and completions as rollout writes them."""
    from rollout import PromptTooLong, build_prompt, render_completion
    from rollout.config import PromptConfig, RolloutConfig
    from tasks import procedural
    from tasks.splits import split_of

    def prompt(task: Task, exemplars: Sequence[Exemplar], style: str) -> Prompt:
        settings = PromptConfig.model_validate(
            {"template": template, "kernel_style": style, "max_tokens": max_prompt_tokens}
        )
        return build_prompt(
            task, exemplars, tokenizer, RolloutConfig(prompt=settings), run_id="sft",
            prompt_id=f"sft/{task.content_hash[:12]}", device_type=device_type(config),
        )  # fmt: skip

    @cache
    def generate(family: str, index: int) -> Task:
        return procedural.generate(family, index, size=config.size)

    @cache
    def seeds(task_id: str) -> Sequence[Any]:
        family, _, index = task_id.removeprefix("procedural:").partition("/")
        return procedural.seed_kernels(generate(family, int(index)))

    return PairSource(
        families=procedural.TRAINING_FAMILIES,
        generate=generate,
        seed_kernels=lambda task: seeds(task.id),
        split_of=split_of,
        build_prompt=prompt,
        render_completion=render_completion,
        encode=lambda text: (*tokenizer.encode(text), tokenizer.end_token_id),
        too_long=PromptTooLong,
        max_completion_tokens=max_completion_tokens,
    )


def device_type(config: SftDataConfig) -> str:
    """Device that prompts of this size name."""
    return "cpu" if config.size == "cpu" else "GPU"


def build_pairs(
    source: PairSource, config: SftDataConfig, *, held_out: bool = False, numbers: range | None = None
) -> Iterator[SftPair]:
    """The pairs, lazily: `config.pairs` to train on, or `config.held_out_pairs` of tasks that training never draws.

    `numbers` asks for some of them only, so that processes can share the work. Raises UsageError when nothing
    suitable is found.
    """
    everything = range(config.held_out_pairs if held_out else config.pairs)
    for number in everything if numbers is None else numbers:
        yield _pair(source, config, number, held_out)


def data_hash(pairs: Sequence[SftPair]) -> str:
    """SHA-256 over all pairs, 64 hex digits."""
    return digest("sft", *(json.dumps(asdict(pair), sort_keys=True) for pair in pairs))


def exemplars_for(task: Task, seeds: Sequence[Any], count: int, rng: random.Random, device: str) -> list[Exemplar]:
    """`count` of the seeds as exemplars with rough scores, of different classes where there are enough; worst first."""
    shuffled = rng.sample(list(seeds), len(seeds))
    first_of_class: dict[str, Any] = {}
    for seed in shuffled:
        first_of_class.setdefault(seed.speed, seed)
    distinct = list(first_of_class.values())
    rest = [seed for seed in shuffled if all(seed is not chosen for chosen in distinct)]
    chosen = (distinct + rest)[:count]
    scored = [(_score(seed, rng), seed) for seed in chosen]
    return [_exemplar(task, seed, speedup, device) for speedup, seed in sorted(scored, key=lambda pair: pair[0])]


def analysis_of(shown: Sequence[Any]) -> str:
    """One sentence that contrasts the shown seeds, worst first, by the reasons that came with them."""
    reasons = [_clause(seed.reason) for seed in shown]
    if not reasons:
        return "There is no earlier kernel to compare."
    if len(reasons) == 1:
        return f"The earlier kernel is {ADJECTIVES[shown[0].speed]} because {reasons[0]}."
    return f"The last is faster because {reasons[-1]}; in the first, {reasons[0]}."


def design_of(seed: Any) -> str:
    """One sentence that says what the target does."""
    words = str(seed.name).partition("-")[0].replace("_", " ")
    sizes = ", ".join(str(value) for value in seed.parameters.values())
    return f"Use {words}{' of ' + sizes if sizes else ''}: {_clause(seed.reason)}."


def _pair(source: PairSource, config: SftDataConfig, number: int, held_out: bool) -> SftPair:
    rng = random.Random(f"{config.seed}/{'held out' if held_out else 'train'}/{number}")
    # Tasks of the perplexity come after those that training draws from.
    first = config.instances if held_out else 0
    for family in rng.sample(source.families, len(source.families)):
        wanted = SPEEDS[number % len(SPEEDS)]
        for speed in (wanted, *rng.sample([other for other in SPEEDS if other != wanted], len(SPEEDS) - 1)):
            for _ in range(ATTEMPTS):
                task = source.generate(family, first + rng.randrange(config.instances))
                pair = _try(source, config, task, speed, rng) if source.split_of(task) == "train" else None
                if pair is not None:
                    return pair
    raise UsageError(
        "no training pair fits the limits: allow longer prompts or completions, or add seed kernels to the families"
    )


def _try(source: PairSource, config: SftDataConfig, task: Task, speed: str, rng: random.Random) -> SftPair | None:
    seeds = list(source.seed_kernels(task))
    target = _target([seed for seed in seeds if seed.speed == speed], rng)
    if target is None or len(source.encode(target.source)) > source.max_completion_tokens:
        return None
    count = rng.choices((0, 1, 2), config.exemplar_shares)[0]
    return _write(source, config, task, target, [s for s in seeds if s.source != target.source], count, rng)


def _target(seeds: Sequence[Any], rng: random.Random) -> Any | None:
    """A template first, then one of its free parameters, so that many parameters do not make a template likelier."""
    by_template: dict[str, list[Any]] = {}
    for seed in seeds:
        by_template.setdefault(str(seed.name).partition("-")[0], []).append(seed)
    return rng.choice(by_template[rng.choice(sorted(by_template))]) if by_template else None


def _write(
    source: PairSource, config: SftDataConfig, task: Task, target: Any, others: Sequence[Any], count: int,
    rng: random.Random,
) -> SftPair | None:  # fmt: skip
    exemplars = exemplars_for(task, others, count, rng, device_type(config))
    try:
        prompt = source.build_prompt(task, exemplars, target.style)
    except source.too_long:
        return None
    by_hash = {exemplar.candidate_hash: exemplar for exemplar in exemplars}
    by_source = {seed.source: seed for seed in others}
    shown = [by_source[by_hash[name].source] for name in prompt.exemplar_hashes]
    completion = source.encode(source.render_completion(analysis_of(shown), design_of(target), target.source))
    if len(completion) > source.max_completion_tokens:
        return None
    return SftPair(
        sequence=TokenSequence(tuple(prompt.token_ids), completion),
        task_id=task.id, composition=task.composition, seed_name=target.name, speed=target.speed,
        exemplars=len(shown),
    )  # fmt: skip


def _score(seed: Any, rng: random.Random) -> float:
    return round(TYPICAL_SPEEDUPS[seed.speed] * math.exp(rng.gauss(0.0, SPREAD)), 2)


def _exemplar(task: Task, seed: Any, speedup: float, device: str) -> Exemplar:
    from tasks.records import Candidate

    measurement = Measurement(
        speedup=speedup, ci_low=speedup, ci_high=speedup, reference_ms=1.0, candidate_ms=1.0 / speedup, pairs=1,
        device_type=device,
    )  # fmt: skip
    return Exemplar(
        task_id=task.id, task_hash=task.content_hash, device_type=device, source=seed.source,
        candidate_hash=Candidate(source=seed.source, origin="seed", detail=seed.name).content_hash,
        speedup=speedup, measurement=measurement, origin=seed.name,
    )  # fmt: skip


def _clause(reason: str) -> str:
    text = reason.strip().rstrip(".")
    return text[:1].lower() + text[1:]
