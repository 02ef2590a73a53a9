"""Trains the demo's LoRA adapter by stage 1, samples from it on held-out compositions, and writes both to a folder.

    python scripts/train_demo_adapter.py --model MODEL_DIR --out OUT_DIR --minutes 4
    python scripts/train_demo_adapter.py --model MODEL_DIR --out OUT_DIR --steps 2 --device cpu    # smoke test

Building 16,000 pairs takes minutes of CPU; to spare an accelerator the wait, build them before:

    python scripts/train_demo_adapter.py --model MODEL_DIR --out PAIRS_DIR --build-only --pairs 16000
    python scripts/train_demo_adapter.py --model MODEL_DIR --out OUT_DIR --pairs-file PAIRS_DIR/pairs.jsonl.gz ...

OUT_DIR gets `adapter/` (bf16 safetensors), `recipe.json` (seed, versions, data hash, losses), `sft.jsonl` (loss curve),
`samples.jsonl` (to be judged by `kontrast evaluate --batch`, or any evaluator) and `progress.txt`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from learner.config import DeepSpeedConfig, LearnerConfig, OptimizerConfig, PolicyConfig, SftConfig, SftDataConfig
from learner.device import resolve_device
from learner.sft_data import PairSource, build_pairs, data_hash, default_source, device_type, exemplars_for
from learner.sft_pairs import Pairs, Recipe, generated_pairs, read_pairs, write_pairs

PACKAGES = ("torch", "transformers", "deepspeed", "peft", "numpy", "tokenizers", "safetensors")
BASE_NAME = "SmolLM2-135M-Instruct"

logger = logging.getLogger("train_demo_adapter")


def main() -> int:
    """Trains, samples, writes; returns the exit code."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True,
        handlers=[logging.StreamHandler(sys.stdout), logging.FileHandler(options.out / "progress.txt")],
    )  # fmt: skip
    device = resolve_device(options.device)
    config = _config(options, device)
    from learner.engine import PolicyTrainer
    from learner.policy import load_policy, save_policy
    from learner.sft import train
    from rollout.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.load(options.model)
    source = _source(tokenizer, config.sft)
    began = time.monotonic()
    recipe = Recipe(config.sft, options.model)
    pairs = read_pairs(options.pairs_file)[0].train if options.pairs_file else generated_pairs(recipe)
    if options.build_only:
        write_pairs(Pairs(pairs, (), {}), options.out / "pairs.jsonl.gz", recipe.digest())
        logger.info("%d pairs, data hash %s", len(pairs), data_hash(pairs))
        return 0
    held_out = list(build_pairs(source, config.sft.data, held_out=True))
    logger.info("%d pairs and %d held out, built in %.0f s", len(pairs), len(held_out), time.monotonic() - began)
    policy = load_policy(config.policy, device, seed=options.seed)
    trainer = PolicyTrainer(policy, config.sft.optimizer, config.deepspeed, device=device)
    report = train(trainer, pairs, held_out, config.sft, options.out, row_tokens=config.deepspeed.row_tokens)
    saved = save_policy(trainer.policy.model, options.out, base_name=BASE_NAME)
    _write_recipe(options, config, asdict(report), saved, device)
    logger.info("%s", json.dumps(asdict(report)))
    sample(options, trainer.policy.model, source, tokenizer, config.sft, device)
    return 0


def _source(tokenizer: Any, config: SftConfig) -> PairSource:
    return default_source(
        tokenizer, config.data, max_prompt_tokens=config.max_prompt_tokens,
        max_completion_tokens=config.max_completion_tokens,
    )  # fmt: skip


def sample(
    options: argparse.Namespace, model: Any, source: PairSource, tokenizer: Any, config: SftConfig, device: str
) -> None:
    """Draws samples for tasks of held-out compositions and writes `samples.jsonl`, a line each."""
    import torch

    prompts = list(_held_out_prompts(options, source, config.data))
    model.eval()
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    causal.set_attn_implementation("sdpa")
    torch.manual_seed(options.seed)
    began, written = time.monotonic(), 0
    with (options.out / "samples.jsonl").open("w") as file:
        for start in range(0, len(prompts), options.prompts_at_once):
            chosen = prompts[start : start + options.prompts_at_once]
            for record, text, ended in _generate(options, model, tokenizer, config, chosen, device):
                file.write(json.dumps({**record, **_read(text, ended, record)}, sort_keys=True) + "\n")
                written += 1
            logger.info("%d samples, %.0f s", written, time.monotonic() - began)


def _held_out_prompts(
    options: argparse.Namespace, source: PairSource, data: SftDataConfig
) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
    """Records and token ids of prompts for `options.tasks` tasks, families in turn."""
    rng = random.Random(f"{options.seed}/samples")
    found, index = 0, 0
    while found < options.tasks and index < 5000:
        for family in source.families:
            task = source.generate(family, index)
            if source.split_of(task) != options.split or found >= options.tasks:
                continue
            seeds = list(source.seed_kernels(task))
            exemplars = exemplars_for(task, seeds, options.exemplars, rng, device_type(data))
            try:
                prompt = source.build_prompt(task, exemplars, options.style)
            except source.too_long:
                continue
            found += 1
            record = {
                "task_id": task.id, "task_hash": task.content_hash, "size": data.size, "family": family,
                "composition": list(task.composition), "split": options.split, "task": task.source,
                "prompt": prompt.text, "exemplar_hashes": list(prompt.exemplar_hashes),
                "exemplar_speedups": list(prompt.exemplar_speedups),
                "seed_hashes": sorted({_hash_of(seed.source) for seed in seeds}),
            }  # fmt: skip
            yield record, tuple(prompt.token_ids)
        index += 1
    if found < options.tasks:
        logger.warning("only %d tasks of split %s were found", found, options.split)


def _generate(
    options: argparse.Namespace, model: Any, tokenizer: Any, config: SftConfig,
    prompts: list[tuple[dict[str, Any], tuple[int, ...]]], device: str,
) -> Iterator[tuple[dict[str, Any], str, bool]]:  # fmt: skip
    import torch

    end = tokenizer.end_token_id
    width = max(len(ids) for _, ids in prompts)
    rows = [(end,) * (width - len(ids)) + ids for _, ids in prompts for _ in range(options.samples_per_task)]
    mask = [(0,) * (width - len(ids)) + (1,) * len(ids) for _, ids in prompts for _ in range(options.samples_per_task)]
    with torch.no_grad():
        output = model.generate(
            input_ids=torch.tensor(rows, device=device), attention_mask=torch.tensor(mask, device=device),
            do_sample=True, temperature=options.temperature, top_k=0, top_p=1.0, use_cache=True,
            max_new_tokens=options.new_tokens or config.max_completion_tokens, eos_token_id=end, pad_token_id=end,
        )[:, width:].tolist()  # fmt: skip
    for number, ids in enumerate(output):
        record, _ = prompts[number // options.samples_per_task]
        ended = end in ids
        own = ids[: ids.index(end)] if ended else ids
        index = number % options.samples_per_task
        yield {"id": f"{record['task_id']}/{index}", **record, "tokens": len(own)}, tokenizer.decode(own), ended


def _read(text: str, ended: bool, record: dict[str, Any]) -> dict[str, Any]:
    from rollout import parse_completion

    parsed = parse_completion(text, cut=not ended)
    own = None if parsed.source is None else _hash_of(parsed.source)
    return {
        "completion": text, "finish_reason": "stop" if ended else "length", "candidate": parsed.source,
        "parse_error": parsed.error, "candidate_hash": own,
        "copy": own in record["exemplar_hashes"], "equals_seed": own in record["seed_hashes"],
    }  # fmt: skip


def _hash_of(source: str) -> str:
    from tasks.records import Candidate

    return Candidate(source=source).content_hash


def _config(options: argparse.Namespace, device: str) -> LearnerConfig:
    small = device == "cpu"
    data = SftDataConfig(
        size=options.size, pairs=options.pairs, held_out_pairs=2 if small else 256, instances=options.instances,
        seed=options.seed,
    )  # fmt: skip
    sft = SftConfig(
        data=data, batch=2 if small else options.batch, steps=options.steps, minutes=options.minutes,
        max_prompt_tokens=options.max_prompt_tokens, max_completion_tokens=options.max_completion_tokens,
        held_out_every=50,
        optimizer=OptimizerConfig(learning_rate=options.learning_rate, warmup_steps=20, decay="cosine"),
    )  # fmt: skip
    policy = PolicyConfig(model=str(options.model), lora_rank=options.rank, lora_alpha=2.0 * max(options.rank, 1))
    row_tokens = 2048 if small else 32768
    return LearnerConfig(
        policy=policy, sft=sft, device=options.device, deepspeed=DeepSpeedConfig(zero_stage=1, row_tokens=row_tokens)
    )


def _write_recipe(
    options: argparse.Namespace, config: LearnerConfig, report: dict[str, Any], saved: Path, device: str
) -> None:
    import torch

    weights = next(saved.glob("*.safetensors"))
    recipe = {
        "base": BASE_NAME,
        "seed": options.seed,
        "command": f"scripts/train_demo_adapter.py --minutes {options.minutes:g} --steps {options.steps} "
        f"--rank {options.rank} --size {options.size} --pairs {options.pairs} --seed {options.seed}",
        "config": {**config.model_dump(mode="json"), "policy": config.policy.model_dump(exclude={"model", "adapter"})},
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "report": report,
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "weights_bytes": weights.stat().st_size,
    }
    (options.out / "recipe.json").write_text(json.dumps(recipe, indent=2, sort_keys=True) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model in Hugging Face layout")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=0.0, help="training time; 0 lets --steps decide")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--size", choices=("cpu", "gpu"), default="cpu", help="size of the tasks, and their seeds")
    parser.add_argument("--style", default="torch", help="kernel style that the sampling prompts recommend")
    parser.add_argument("--rank", type=int, default=8, help="LoRA rank; 0 trains every weight")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=None)
    parser.add_argument("--pairs-file", type=Path, default=None, help="pairs that --build-only wrote")
    parser.add_argument("--build-only", action="store_true", help="write pairs.jsonl.gz, train nothing")
    parser.add_argument("--instances", type=int, default=400, help="task instances per family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-prompt-tokens", type=int, default=512)
    parser.add_argument("--max-completion-tokens", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=None, help="tasks to sample for")
    parser.add_argument("--samples-per-task", type=int, default=None)
    parser.add_argument("--split", default="held_out_composition")
    parser.add_argument("--exemplars", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--new-tokens", type=int, default=None, help="tokens of one sample; default: as trained")
    parser.add_argument("--prompts-at-once", type=int, default=24)
    options = parser.parse_args()
    small = resolve_device(options.device) == "cpu"
    defaults = (("pairs", 16, 16000), ("tasks", 2, 48), ("samples_per_task", 1, 4), ("new_tokens", 8, 0))
    for name, on_cpu, on_gpu in defaults:
        if getattr(options, name) is None:
            setattr(options, name, on_cpu if small else on_gpu)
    return options


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    raise SystemExit(main())
