"""The learner's part of the configuration."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tasks.config import Section


class PolicyConfig(Section):
    """The model that is trained."""

    model: str = ""
    """Folder of the base model: Hugging Face layout, safetensors and tokenizer."""
    adapter: str = ""
    """Folder of a LoRA adapter to start from; empty for a fresh one."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of weights and activations; auto: bf16 where the processor multiplies it natively, else fp32.
    The optimizer keeps fp32 copies either way."""
    lora_rank: int = Field(default=8, ge=0, le=512)
    """Rank of the LoRA adapter on all linear layers; 0 trains every weight."""
    lora_alpha: float = Field(default=16.0, gt=0)
    """LoRA's numerator: the delta is scaled by alpha / rank."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third slower, far less memory."""
    fp32_logits: bool = True
    """Compute log-probabilities from fp32 logits."""
    logit_rows: int = Field(default=4096, ge=1)
    """Tokens whose logits exist at once; bounds memory to this times the vocabulary."""


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, where the number of steps is known."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first decay."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """AdamW's second decay."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_gradient_norm: float = Field(default=1.0, ge=0)
    """Global gradient norm is clipped to this; 0 never clips."""


class DeepSpeedConfig(Section):
    """How DeepSpeed shards the training state."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """What is sharded over ranks: nothing, optimizer state, gradients too, weights too."""
    offload: bool = False
    """Keep optimizer state in host memory (ZeRO 1 to 3)."""
    fp32_accumulation: bool = True
    """Accumulate bf16 gradients in fp32 where the ZeRO stage can (stage 1)."""
    row_tokens: int = Field(default=4096, ge=64)
    """Tokens of one micro-batch; a longer single prompt with its completion gets a micro-batch of its own."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait of one collective operation."""


class SftDataConfig(Section):
    """Stage 1's pairs: generated from procedural tasks and their seed kernels, and read from demonstrations."""

    demonstrations: tuple[str, ...] = ()
    """Runs of `kontrast augment`, or their `demonstrations.jsonl`; those of held-out tasks are not trained on."""

    size: Literal["cpu", "gpu"] = "cpu"
    """Size of the procedural tasks, and the device their seed kernels are for."""
    instances: int = Field(default=400, ge=1)
    """Task instances drawn per training family."""
    pairs: int = Field(default=12000, ge=0)
    """Training pairs that are generated; 0 trains on demonstrations alone."""
    held_out_pairs: int = Field(default=128, ge=0)
    """Generated pairs of training compositions kept for the perplexity; no task of theirs is trained on."""
    exemplar_shares: tuple[float, float, float] = (0.15, 0.15, 0.7)
    """Shares of prompts that show no, one and two exemplars."""
    seed: int = 0
    """All draws follow from it."""


class SftConfig(Section):
    """Stage 1: supervised fine-tuning on verified kernels."""

    data: SftDataConfig = SftDataConfig()
    batch: int = Field(default=64, ge=1)
    """Pairs of one optimizer step, over all ranks."""
    steps: int = Field(default=300, ge=1)
    """Optimizer steps."""
    minutes: float = Field(default=0.0, ge=0)
    """Stop after this long; 0 lets `steps` decide."""
    max_prompt_tokens: int = Field(default=512, ge=64)
    """Prompts are built to fit this; exemplars are dropped from longer ones."""
    max_completion_tokens: int = Field(default=200, ge=16)
    """Targets longer than this are not drawn."""
    max_tokens: int = Field(default=1024, ge=16)
    """Pairs longer than this are left out and counted."""
    layout: Literal["auto", "pack", "pad"] = "auto"
    """How pairs share a micro-batch: `pack` puts them behind each other without padding, `pad` gives rows of like
    length; auto packs on CPU and pads on a GPU."""
    held_out_every: int = Field(default=50, ge=1)
    """Steps between held-out perplexities."""
    checkpoint_every: int = Field(default=50, ge=1)
    """Steps between checkpoints; a run that is killed goes on from the latest."""
    progress_s: float = Field(default=60.0, gt=0)
    """Seconds between progress lines."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3, warmup_steps=20, decay="cosine")


class RewardConfig(Section):
    """What an evaluation is worth."""

    shape: Literal["speedup", "log_speedup"] = "speedup"
    """Reward of an accepted candidate: its speedup (CUDA-L1, Eq. 2) or the natural logarithm of it."""
    lower_end: Literal["auto", "always", "never"] = "auto"
    """Take the lower end of the confidence interval: under protocol `reward` only, always, or never."""
    rejected: float = 0.0
    """Reward of a rejected candidate."""
    unreadable: float | None = None
    """Reward of a completion without readable code; unset: as `rejected`."""
    copy_: float | None = Field(default=None, alias="copy")
    """Reward of a copy of a shown exemplar; unset: as `rejected`."""
    truncated: float | None = None
    """Reward of a completion cut by the token limit; unset: what its code is worth, if it can be read."""
    same_formula_cap: float = Field(default=1.0, gt=0)
    """Highest speedup that pays for a candidate labelled `same_formula`."""

    def pays_lower_end(self, protocol: str) -> bool:
        """Whether a measurement by this protocol is paid by the lower end of its interval."""
        return self.lower_end == "always" or (self.lower_end == "auto" and protocol == "reward")


class GroupsConfig(Section):
    """What every stage that samples asks of its groups."""

    groups_per_step: int = Field(default=1, ge=1)
    """Groups of one optimizer step."""
    max_staleness: int = Field(default=4, ge=0)
    """A group whose oldest token is more policy steps old than this leaves as stale."""
    quorum: float = Field(default=0.5, gt=0, le=1)
    """Share of a group's samples that must have a reward, two at least; a group with fewer leaves as below quorum."""
    correction: Literal["truncated", "masked", "sequence_masked", "none"] = "truncated"
    """Importance weights of the trainer against the sampler: each token's ratio, at most `correction_cap`; the ratio,
    but 0 outside `correction_floor` to `correction_cap` (IcePop); the truncated ratio, but 0 for a whole sequence whose
    geometric mean ratio lies outside; or none."""
    correction_cap: float = Field(default=2.0, ge=1)
    """Largest importance weight."""
    correction_floor: float = Field(default=0.5, ge=0, le=1)
    """Smallest ratio that a mask lets pass."""
    truncated_completions: Literal["train", "mask"] = "train"
    """Whether completions cut by the token limit give gradients; their reward counts in the group either way."""


class SelfSupervisedConfig(GroupsConfig):
    """Stage 2: REINFORCE with reward 1 for an accepted sample, 0 for any other, and no baseline."""


class GrpoConfig(GroupsConfig):
    """Stage 3: contrastive RL by GRPO. Defaults follow CUDA-L1 where it reports a value."""

    smoothing: Literal["group", "running", "none"] = "group"
    """Scope of the mean and deviation of Eq. 6."""
    smoothing_clip: float = Field(default=1.5, gt=0)
    """Eq. 6's k: a normalised reward is clipped to +-k."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted: the group's mean (Eq. 4), or the mean of the other samples. With several turns always the
    latter, turn by turn: a mean with the sample itself in it biases them (Dr. Kernel)."""
    turn_discount: float = Field(default=0.4, ge=0, le=1)
    """What a turn earns of the next one's reward, where conversations have several."""
    scale: Literal["std", "std_floor", "noise_floor", "none"] = "std"
    """What divides: the group's deviation (Eq. 4); the same, but at least `std_floor`, or at least the noise of the
    group's own timings by their intervals; or nothing."""
    std_floor: float = Field(default=0.05, gt=0)
    """Smallest deviation under `std_floor`, in units of the reward."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """PPO's lower clip of the probability ratio: 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """PPO's upper clip of the probability ratio: 1 + clip_high."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps on one batch; with more than one the old policy's log-probabilities are computed first."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of the KL term to the reference model (k3); 0 needs no reference. CUDA-L1 reports no value."""
    kl_log_clamp: float = Field(default=20.0, gt=0)
    """Bound of the log-ratio inside the KL term."""
    aggregation: Literal["token", "sequence", "prompt", "constant"] = "token"
    """Average over the optimizer step's tokens; over its sequences' token means; over its prompts' token means; or the
    sum of tokens over sequences times `aggregation_tokens` (Dr. GRPO)."""
    aggregation_tokens: int = Field(default=1024, ge=1)
    """Constant length of a sequence under `constant`."""
    zero_variance: Literal["drop", "keep"] = "drop"
    """A group without variance leaves as zero variance and another takes its place, or it stays in its step, where its
    advantages are 0 and its tokens count in averages and KL."""
    zero_variance_below: float = Field(default=1e-9, ge=0)
    """Largest difference between the rewards of a group that counts as no variance."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.scale == "none" and self.smoothing == "group":
            raise ValueError(
                'scale = "none" has no effect under smoothing = "group", which divides by the group\'s deviation too: '
                'set smoothing to "running" or "none"'
            )
        return self


class CheckpointConfig(Section):
    """Checkpoints of the learner."""

    every_steps: int = Field(default=1, ge=1)
    """Optimizer steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Complete checkpoints kept."""


class PublishConfig(Section):
    """How weights reach the engines."""

    adapter: Literal["files", "ipc_024"] = "files"
    """`files`: safetensors that the engine reads; `ipc_024`: vLLM 0.24's transfer on one device."""
    folder: str = ""
    """Where `files` writes; empty: /dev/shm if it has room for two copies of the weights, else the temporary folder."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Longest time of one phase before the watchdog speaks."""


class LearnerConfig(Section):
    """The learner: stages, DeepSpeed, checkpoints, publication."""

    stage: Literal["self_supervised", "contrastive", "frozen"] = "contrastive"
    """What a step does: stage 2 (REINFORCE on accepted samples), stage 3 (contrastive RL by GRPO), or nothing: the
    policy stays frozen, and a step is a round of evolutionary search by prompts alone."""
    policy: PolicyConfig = PolicyConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    sft: SftConfig = SftConfig()
    reward: RewardConfig = RewardConfig()
    self_supervised: SelfSupervisedConfig = SelfSupervisedConfig()
    grpo: GrpoConfig = GrpoConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    publish: PublishConfig = PublishConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy is trained."""
    cpu_threads: int = Field(default=1, ge=1)
    """Threads of the trainer on CPU. More than the free cores is many times slower, not a little."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature that log-probabilities are computed at; must equal rollout's."""
    steps: int = Field(default=2, ge=1)
    """Optimizer steps of the stage."""
    idle_timeout_s: float = Field(default=3600.0, gt=0)
    """Longest wait for a scored group."""

    @property
    def groups(self) -> GroupsConfig:
        """What the stage asks of its groups."""
        return self.self_supervised if self.stage == "self_supervised" else self.grpo

    @property
    def groups_section(self) -> str:
        """Name of the section that `groups` comes from, for messages."""
        return "learner.self_supervised" if self.stage == "self_supervised" else "learner.grpo"
