"""Stage 1's data on its way to the trainer: built once, by several processes, from both sources; written, read back.

Invariants: what is built follows from the configuration and the files alone, however many processes build it; the file
of pairs is whole or absent and says what it was made from, so that a resumed run never goes on with other data;
demonstrations of held-out tasks are never trained on.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from learner.batch import TokenSequence
from learner.config import SftConfig
from learner.sft_data import PairSource, SftPair, analysis_of, build_pairs, default_source
from tasks.errors import UsageError
from tasks.records import Demonstration
from tasks.records.base import digest

IN_PROCESS = 1000
"""Fewer pairs are built without further processes."""
DEMONSTRATIONS = "demonstrations.jsonl"
"""What a run of `kontrast augment` calls its file."""


@dataclass(frozen=True)
class Recipe:
    """What pairs are made from. `template` and `style` are those of the prompts that the policy will get."""

    sft: SftConfig
    model: Path
    """Folder whose tokenizer is used."""
    template: str = "compact"
    style: str = "torch"

    def digest(self) -> str:
        """64 hex digits over settings, tokenizer and demonstrations."""
        tokenizer = self.model / "tokenizer.json"
        read = [path.read_text() for path in [tokenizer, *self.files()] if path.is_file()]
        return digest("pairs", self.sft.data.model_dump_json(), self.template, self.style, *read)

    def files(self) -> list[Path]:
        """The demonstrations' files; raises UsageError for one that is not there."""
        found = []
        for name in self.sft.data.demonstrations:
            path = Path(name)
            path = path / DEMONSTRATIONS if path.is_dir() else path
            if not path.is_file():
                raise UsageError(
                    f"there are no demonstrations at {name} (learner.sft.data.demonstrations): name a run of kontrast "
                    f"augment, or its {DEMONSTRATIONS}"
                )
            found.append(path)
        return found

    def source(self) -> PairSource:
        """Tokenizer and prompts."""
        from rollout.tokenizer import ChatTokenizer

        return default_source(
            ChatTokenizer.load(self.model), self.sft.data, max_prompt_tokens=self.sft.max_prompt_tokens,
            max_completion_tokens=self.sft.max_completion_tokens, template=self.template,
        )  # fmt: skip


@dataclass(frozen=True)
class Pairs:
    """Stage 1's data."""

    train: Sequence[SftPair]
    held_out: Sequence[SftPair]
    left_out: Mapping[str, int]
    """Demonstrations that are in neither, by reason."""


def build(recipe: Recipe, *, processes: int = 0) -> Pairs:
    """Builds everything; 0 processes takes one a core. Raises UsageError when there is nothing to train on."""
    if not recipe.sft.data.pairs and not recipe.sft.data.demonstrations:
        raise UsageError("there is nothing to train on: set learner.sft.data.pairs, or name demonstrations")
    source = recipe.source()
    train, held_out, left_out = demonstration_pairs(source, recipe)
    generated = generated_pairs(recipe, processes=processes)
    if recipe.sft.data.pairs:
        held_out = [*held_out, *build_pairs(source, recipe.sft.data, held_out=True)]
    if not train and not generated:
        raise UsageError(f"no demonstration can be trained on: {_words(left_out)}")
    return Pairs([*generated, *train], held_out, left_out)


def generated_pairs(recipe: Recipe, *, processes: int = 0) -> list[SftPair]:
    """The procedural pairs, in order; how many processes build them changes nothing."""
    count, workers = recipe.sft.data.pairs, processes or min(16, len(os.sched_getaffinity(0)))
    if count < IN_PROCESS or workers < 2:
        return _part(recipe, range(count))
    size = -(-count // (4 * workers))
    parts = [range(start, min(start + size, count)) for start in range(0, count, size)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        built = pool.starmap(_part, [(recipe, part) for part in parts])
    return [pair for part in built for pair in part]


def _part(recipe: Recipe, numbers: range) -> list[SftPair]:
    return list(build_pairs(recipe.source(), recipe.sft.data, numbers=numbers)) if numbers else []


def demonstration_pairs(source: PairSource, recipe: Recipe) -> tuple[list[SftPair], list[SftPair], Counter[str]]:
    """Pairs to train on, pairs for the perplexity (tasks of training compositions that are kept for testing), and how
    many demonstrations are in neither, by reason."""
    train: list[SftPair] = []
    held_out: list[SftPair] = []
    left_out: Counter[str] = Counter()
    for one in read_demonstrations(recipe.files()):
        split = source.split_of(one.task)
        if split not in ("train", "held_out_instance"):
            left_out[f"{split.replace('_', ' ')}"] += 1
            continue
        pair = _pair(source, one, recipe.style)
        if isinstance(pair, str):
            left_out[pair] += 1
        else:
            (train if split == "train" else held_out).append(pair)
    return train, held_out, left_out


def _pair(source: PairSource, one: Demonstration, style: str) -> SftPair | str:
    """The pair, or why there is none. The prompt shows no earlier kernel, as when the kernel was written."""
    try:
        prompt = source.build_prompt(one.task, (), style)
    except source.too_long:
        return "prompt too long"
    analysis, design = (_prose(source, part) for part in (one.analysis, one.design))
    completion = source.encode(source.render_completion(analysis or analysis_of(()), design, one.candidate.source))
    if len(completion) > source.max_completion_tokens:
        return "completion too long"
    return SftPair(
        sequence=TokenSequence(tuple(prompt.token_ids), completion), task_id=one.task.id,
        composition=one.task.composition, seed_name=one.candidate.detail, speed="", exemplars=0,
    )  # fmt: skip


def _prose(source: PairSource, text: str) -> str:
    """The lines that cannot be taken for headings or fences of the completion."""
    return "\n".join(line for line in text.splitlines() if _renders(source, line)).strip()


def _renders(source: PairSource, line: str) -> bool:
    try:
        source.render_completion(line, "", "")
    except ValueError:
        return False
    return True


def read_demonstrations(paths: Iterable[Path]) -> Iterator[Demonstration]:
    """Every line of the files. Raises UsageError naming the first that is none."""
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            raise UsageError(f"{path} cannot be read ({reason}): name a {DEMONSTRATIONS}") from error
        for number, line in enumerate(lines, 1):
            try:
                yield Demonstration.from_json(line)
            except ValidationError as error:
                raise UsageError(f"line {number} of {path} is no demonstration: take it out") from error


def load_or_build(recipe: Recipe, path: Path) -> Pairs:
    """The pairs in the file, built and written on the first call. Raises UsageError when the file is of other data."""
    made_from = recipe.digest()
    if path.is_file():
        pairs, known = read_pairs(path)
        if known != made_from:
            raise UsageError(
                f"{path} was built from other data than the configuration names now: start a new run, or undo the "
                "change of learner.sft.data"
            )
        return pairs
    pairs = build(recipe)
    write_pairs(pairs, path, made_from)
    return pairs


def write_pairs(pairs: Pairs, path: Path, made_from: str) -> None:
    """Writes everything in one step: a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with gzip.open(partial, "wt") as file:
        file.write(json.dumps({"made_from": made_from, "left_out": dict(pairs.left_out)}) + "\n")
        for kind, listed in (("train", pairs.train), ("held_out", pairs.held_out)):
            for pair in listed:
                file.write(json.dumps({"kind": kind, **asdict(pair)}, sort_keys=True) + "\n")
    partial.replace(path)


def read_pairs(path: Path) -> tuple[Pairs, str]:
    """What `write_pairs` wrote: the pairs and what they were made from."""
    train: list[SftPair] = []
    held_out: list[SftPair] = []
    with gzip.open(path, "rt") as file:
        head = json.loads(next(file))
        for line in file:
            fields = json.loads(line)
            (train if fields.pop("kind") == "train" else held_out).append(_pair_of(fields))
    return Pairs(train, held_out, head["left_out"]), head["made_from"]


def _pair_of(fields: dict[str, Any]) -> SftPair:
    ids = fields["sequence"]
    sequence = TokenSequence(tuple(ids["prompt_ids"]), tuple(ids["completion_ids"]))
    return SftPair(**{**fields, "sequence": sequence, "composition": tuple(fields["composition"])})


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or "the files are empty"
