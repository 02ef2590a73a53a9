"""The whole configuration: one frozen tree, a section per package, and what the sections must agree on.

Invariants: every section's keys live in its own package's `config.py`; a value that two sections need is said once and
read from there; whatever contradicts itself is refused before anything starts, naming both keys.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from deploy.resolve import Tree, merge, parse_overrides, read_tree, to_toml, validate
from evaluator.config import EvaluatorConfig
from evaluator.review import SMALLEST_PROMPT
from exemplar_store.config import StoreConfig
from learner.config import LearnerConfig
from rollout.config import OpenAIConfig, PromptConfig, RolloutConfig, SamplingConfig
from tasks.config import Section
from tasks.records.base import digest


class RunConfig(Section):
    """What is trained on, and for how long."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9_-]+$")
    """Middle part of the run's id."""
    folder: Path = Path("runs")
    """Folder that holds the runs' folders."""
    stages: tuple[str, ...] = ("rl",)
    """Stages in their order, each from the weights of the one before: `sft`, `self_supervised`, `contrastive`,
    `frozen`, or `rl` for what `learner.stage` says."""
    tasks: tuple[str, ...] = ()
    """Selectors of the tasks: `procedural:row_norm/0-15`, `kernelbench:1`, a file or a folder of one's own."""
    size: Literal["cpu", "gpu"] = "gpu"
    """Size of procedural tasks."""
    max_groups: int = Field(default=0, ge=0)
    """Groups formed at most, dropped ones included; 0 forms as many as the learner's steps need."""
    give_up_after: int = Field(default=256, ge=0)
    """Groups dropped one after another, without a step between, that end the run: its tasks are solved or out of the
    policy's reach; 0 goes on for ever."""
    partial_steps: bool = False
    """Take a step with the usable groups of a round instead of waiting for others in place of the dropped ones."""
    seed_kernels: Literal["all", "one_per_speed", "none"] = "all"
    """Seed kernels of procedural tasks that are evaluated first, so that the first prompts show exemplars: all, one of
    each class of speed, or none."""
    confirm: bool = True
    """Measure the best new kernel of each task again, in full and on fresh seeds, when the run ends."""
    require_speedup: float = Field(default=0.0, ge=0)
    """A confirmed new kernel's interval must lie above this, else the command ends with exit code 1; 0 asks nothing."""
    dump_rollouts: bool = False
    """Write every scored group, tokens and log-probabilities included, to `rollouts.jsonl` in the run's folder: what
    `kontrast train --rollouts FILE` trains on without generators."""
    keep_samples: bool = False
    """Write every sample with its text and outcome to `samples.jsonl` in the run's folder."""
    seed: int = 0
    """All of the run's own draws follow from it."""


class HeldOutConfig(Section):
    """Tasks that the policy is measured on and never trained on."""

    eval_every: int = Field(default=0, ge=0)
    """Steps between two evaluations, the first before any step, one more after the last; 0 never."""
    sets: dict[str, str] = {}
    """Tasks of each set, by its name: selectors as in `run.tasks`, separated by commas."""
    samples: int = Field(default=4, ge=1)
    """Samples of each prompt."""
    prompts: Literal["with_exemplars", "without_exemplars", "both"] = "with_exemplars"
    """Whether prompts show exemplars: seed kernels of the task, the same at every step whatever `store.strategy` is."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.eval_every and not any(self.sets.values()):
            raise ValueError(
                f"held_out.eval_every = {self.eval_every} has nothing to evaluate: name tasks in held_out.sets"
            )
        return self


class Timeouts(Section):
    """Longest waits of the coordinator, in seconds; an error names the one that passed."""

    start_timeout_s: float = Field(default=600.0, gt=0)
    """For an actor to start: imports, model and engine included."""
    store_timeout_s: float = Field(default=60.0, gt=0)
    """For one answer of the store."""
    seed_timeout_s: float = Field(default=1200.0, gt=0)
    """For the seed kernels of one task."""
    generate_timeout_s: float = Field(default=1200.0, gt=0)
    """For all samples of one group."""
    evaluate_timeout_s: float = Field(default=900.0, gt=0)
    """For one evaluation, waiting for the device and measuring it again included."""
    learn_timeout_s: float = Field(default=3600.0, gt=0)
    """For one step of the learner, and for a checkpoint."""
    publish_timeout_s: float = Field(default=600.0, gt=0)
    """For one publication of the weights."""
    grace_s: float = Field(default=30.0, ge=0)
    """For what is in flight when the run is asked to stop."""


class ClusterConfig(Timeouts):
    """Where the roles run."""

    address: str = ""
    """Ray cluster to join; empty joins the one that RAY_ADDRESS or a submitted job names, else starts one here."""
    generators: int = Field(default=1, ge=1)
    """Generator actors."""
    generator_gpus: float = Field(default=1.0, ge=0)
    """GPUs of each; a share below 1 where roles take turns on one GPU, 0 for CPU."""
    generator_cpus: float = Field(default=1.0, gt=0)
    """CPUs of each."""
    learner_ranks: int = Field(default=1, ge=1)
    """Processes of the learner, together on one node."""
    learner_gpus: float = Field(default=1.0, ge=0)
    """GPUs of each rank."""
    learner_cpus: float = Field(default=1.0, gt=0)
    """CPUs of each rank."""
    evaluator_gpus: float = Field(default=1.0, ge=0)
    """GPUs of each evaluator; 1 is exclusive, a share below 1 is for a GPU on which roles take turns."""
    evaluator_cpus: float = Field(default=1.0, ge=0)
    """CPUs of each evaluator."""
    take_turns: bool = False
    """Generate, evaluate and learn one after the other, because they share one device or a few cores."""
    attempts: int = Field(default=2, ge=1)
    """How often a sample is drawn, and how often it is evaluated, before it is given up."""
    restarts: int = Field(default=8, ge=-1)
    """How often Ray starts a dead actor again; -1 for ever."""


class ReviewConfig(Section):
    """The reviewing model, which gives its opinion on large jumps beside similar known cheats."""

    mode: Literal["off", "advisory", "binding"] = "off"
    """`advisory` notes its verdict on the sample; `binding` rejects what it takes for a cheat."""
    jump: float = Field(default=2.0, gt=1)
    """Score above this multiple of the task's best is a large jump."""
    above: float = Field(default=3.0, gt=1)
    """Score above this is one as well, whatever the best."""
    engine: Literal["openai", "vllm", "transformers"] = "openai"
    """What runs the model: an OpenAI-compatible endpoint, or an engine on the cluster."""
    model: str = ""
    """Checkpoint folder or packaged model of an engine on the cluster; an endpoint's is named in `review.openai`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where an engine on the cluster runs."""
    cpus: float = Field(default=0.0, ge=0)
    """CPUs of the reviewer's process."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of the reviewer's process."""
    temperature: float = Field(default=0.2, gt=0, le=2)
    """Sampling temperature of its answer."""
    max_tokens: int = Field(default=1024, ge=64)
    """Longest answer in tokens, reasoning included."""
    max_prompt_chars: int = Field(default=24_000, ge=SMALLEST_PROMPT)
    """Longest question in characters; similar cases give way first."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for its answer; then the sample goes on unreviewed."""
    openai: OpenAIConfig = OpenAIConfig()

    def rollout(self) -> RolloutConfig:
        """The engine's settings."""
        return _single_answers(self)


class TeacherConfig(Section):
    """One model that writes kernels for stage 1."""

    engine: Literal["openai", "vllm", "transformers"] = "openai"
    """What runs the model: an OpenAI-compatible endpoint, or an engine in this process."""
    model: str = ""
    """Checkpoint folder or packaged model of an engine here; an endpoint's is named in `openai`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where an engine here runs."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature."""
    max_tokens: int = Field(default=8192, ge=16)
    """Longest answer in tokens, reasoning included."""
    tasks_at_once: int = Field(default=8, ge=1)
    """Tasks that the teacher works on at the same time; the attempts at one task come one after the other."""
    price_in: float = Field(default=0.0, ge=0)
    """Price of a million tokens of prompts, in any currency."""
    price_out: float = Field(default=0.0, ge=0)
    """Price of a million tokens of answers."""
    openai: OpenAIConfig = OpenAIConfig()

    def rollout(self) -> RolloutConfig:
        """The engine's settings."""
        return _single_answers(self)


def _single_answers(asked: ReviewConfig | TeacherConfig) -> RolloutConfig:
    """An engine that gives one answer to a question, from a section that describes a model."""
    return RolloutConfig(
        engine=asked.engine, model=asked.model, device=asked.device, openai=asked.openai,
        sampling=SamplingConfig(temperature=asked.temperature, max_tokens=asked.max_tokens, group_size=1),
    )  # fmt: skip


class AugmentConfig(Section):
    """Stage 1's data: teachers write kernels for the run's tasks, and what the evaluator accepts is kept."""

    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Teachers by a name of one's own, such as `[augment.teachers.large]`."""
    imports: tuple[Path, ...] = ()
    """Existing sets to evaluate and keep in the same way: CUDA-L1's lines, KernelBench run folders, demonstrations, and
    folders in which each `task.py` has its kernels beside it."""
    attempts: int = Field(default=20, ge=1)
    """Answers asked of each teacher for a task."""
    successes: int = Field(default=2, ge=1)
    """Different accepted kernels of a teacher after which no more is asked of it for a task."""
    above: float = Field(default=0.0, ge=0)
    """Keep only kernels whose interval lies above this speedup; 0 keeps whatever is accepted, as CUDA-L1 does."""
    max_cost: float = Field(default=0.0, ge=0)
    """Ask nothing more once the answers have cost this much, by the teachers' prices; 0 sets no limit."""
    prompt: PromptConfig = PromptConfig(template="contrastive", max_tokens=16384)

    @model_validator(mode="after")
    def _named(self) -> Self:
        for name, teacher in self.teachers.items():
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
                raise ValueError(f"augment.teachers.{name}: a teacher's name is letters, digits, dots and dashes")
            if teacher.engine == "openai" and not (teacher.openai.base_url and teacher.openai.model):
                raise ValueError(f"augment.teachers.{name} needs an endpoint: set its openai.base_url and openai.model")
            if teacher.engine != "openai" and not teacher.model:
                raise ValueError(f"augment.teachers.{name}.engine = {teacher.engine!r} needs a checkpoint: set model")
        return self


class ObserveConfig(Section):
    """Progress and metrics."""

    progress_s: float = Field(default=10.0, gt=0)
    """Seconds between progress lines where there is no terminal."""
    metrics: bool = False
    """Export Prometheus metrics."""
    metrics_host: str = "127.0.0.1"
    """Address that metrics are served at; beyond loopback only when said here."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the driver's metrics; 0 takes a free one."""
    tensorboard: bool = False
    """Write each step's figures for TensorBoard, in the run's folder; needs the package tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Write each step's figures for Weights & Biases: into the run's folder, or to its servers; needs the package
    wandb."""
    wandb_project: str = "kontrast"
    """Project of W&B."""


class Config(Section):
    """The whole tree."""

    run: RunConfig = RunConfig()
    held_out: HeldOutConfig = HeldOutConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    store: StoreConfig = StoreConfig()
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()
    cluster: ClusterConfig = ClusterConfig()
    review: ReviewConfig = ReviewConfig()
    augment: AugmentConfig = AugmentConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        sampling, learner = self.rollout.sampling, self.learner
        if sampling.temperature != learner.temperature:
            raise ValueError(
                f"rollout.sampling.temperature = {sampling.temperature:g} and learner.temperature = "
                f"{learner.temperature:g} must be equal: the learner computes log-probabilities at the sampler's"
            )
        groups, section = learner.groups, learner.groups_section
        if self.rollout.staleness.max_staleness > groups.max_staleness:
            raise ValueError(
                f"rollout.staleness.max_staleness = {self.rollout.staleness.max_staleness} lets groups be formed that "
                f"{section}.max_staleness = {groups.max_staleness} drops: lower the first or raise the second"
            )
        if sampling.group_size < 2:
            raise ValueError("rollout.sampling.group_size = 1 leaves nothing to compare within a group: set 2 or more")
        if learner.policy.model not in ("", self.rollout.model):
            raise ValueError(
                f"learner.policy.model = {learner.policy.model!r} and rollout.model = {self.rollout.model!r} must be "
                f"the same: leave learner.policy.model empty"
            )
        if self.cluster.evaluator_gpus < 1 and self.on_gpu() and not self.cluster.take_turns:
            raise ValueError(
                f"cluster.evaluator_gpus = {self.cluster.evaluator_gpus:g} shares a GPU that is timed on: "
                f"set cluster.take_turns = true, or cluster.evaluator_gpus = 1"
            )
        if 0 < self.run.max_groups < groups.groups_per_step and not self.run.partial_steps:
            raise ValueError(
                f"run.max_groups = {self.run.max_groups} is below {section}.groups_per_step = "
                f"{groups.groups_per_step}: no step could be taken"
            )
        if learner.stage == "frozen" and self.cluster.learner_ranks > 1:
            raise ValueError(
                f'learner.stage = "frozen" learns nothing, and cluster.learner_ranks = {self.cluster.learner_ranks} '
                f"would share that among processes: set cluster.learner_ranks = 1"
            )
        self._check_review()
        if "sft" in self.run.stages and learner.sft.data.pairs and learner.sft.data.size != self.run.size:
            raise ValueError(
                f"learner.sft.data.size = {learner.sft.data.size!r} and run.size = {self.run.size!r} must be the same: "
                f"the policy would learn kernels of the other device"
            )
        return self

    def _check_review(self) -> None:
        review = self.review
        if review.mode == "off":
            return
        if review.engine == "openai" and not (review.openai.base_url and review.openai.model):
            raise ValueError("review.mode needs a model: set review.openai.base_url and review.openai.model")
        if review.engine != "openai" and not review.model:
            raise ValueError(f"review.engine = {review.engine!r} needs a checkpoint: set review.model")
        if review.engine != "openai" and self.cluster.take_turns:
            raise ValueError(
                f"review.engine = {review.engine!r} would run beside timings, for which roles take turns "
                f'(cluster.take_turns = true): set review.engine = "openai" and name an endpoint elsewhere'
            )

    def device_types(self) -> dict[str, int]:
        """Device types that are measured on, with their number of evaluators; a count of 0 takes a type out."""
        return {device_type: count for device_type, count in self.evaluator.pool.items() if count > 0}

    def on_gpu(self) -> bool:
        """True when any evaluator measures on a GPU."""
        return any(device_type != "cpu" for device_type in self.device_types())

    def to_toml(self) -> str:
        """The tree as TOML that reads back to an equal tree."""
        return to_toml(self.model_dump(mode="json", by_alias=True))

    def digest(self) -> str:
        """64 hex digits over the resolved tree."""
        return digest("config", self.to_toml())


def load_config(source: str, overrides: list[str] | None = None) -> Config:
    """The configuration of a preset or TOML file with `--section.key value` laid over it; raises ConfigError."""
    tree: Tree = merge(read_tree(source), parse_overrides(overrides or [], Config))
    return validate(Config, tree, source)
