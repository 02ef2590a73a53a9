"""The rollout's part of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tasks.config import Section

KernelStyle = Literal["torch", "c", "triton", "cuda"]


class PromptConfig(Section):
    """What the policy is asked."""

    template: Literal["contrastive", "compact"] = "compact"
    """`contrastive`: CUDA-L1's whole prompt; `compact`: the same sections in few tokens, for small models."""
    kernel_style: KernelStyle = "torch"
    """The way of writing kernels that the prompt recommends; other ways are judged all the same."""
    max_tokens: int = Field(default=512, ge=64)
    """Longest prompt in tokens, chat template included: exemplars are swapped or dropped, code is never cut."""
    feedback_tokens: int = Field(default=128, ge=32)
    """What each further turn may add to the conversation beside the answer itself, in tokens."""


class SamplingConfig(Section):
    """How completions are drawn."""

    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature; log-probabilities are recorded at this temperature."""
    max_tokens: int = Field(default=200, ge=1)
    """Longest completion in tokens."""
    group_size: int = Field(default=8, ge=1)
    """Samples of one prompt."""


class StalenessConfig(Section):
    """How far generation may run ahead of the learner."""

    max_staleness: int = Field(default=1, ge=0)
    """Optimizer steps that may lie between a sample's first token and the step that trains on it."""
    max_groups_in_flight: int = Field(default=64, ge=1)
    """Groups dispatched and not yet complete, whatever the staleness would allow."""


class VllmConfig(Section):
    """Settings of the vLLM engine."""

    max_sequences: int = Field(default=64, ge=1)
    """Sequences decoded at once."""
    gpu_memory_share: float = Field(default=0.3, gt=0, lt=1)
    """Share of the GPU's memory for weights and KV cache."""
    kv_cache_gib: int = Field(default=1, ge=1)
    """Memory of the KV cache on CPU, in GiB."""
    cpu_block_tokens: int = Field(default=32, ge=16, multiple_of=16)
    """Tokens of one KV cache block on CPU; prompts share whole blocks, so a small one saves prefill."""
    compile: bool = False
    """Compile the model and capture CUDA graphs: faster decoding, tens of seconds longer start."""
    sleep: bool = False
    """Free weights and KV cache while another part has the GPU (turn taking)."""
    weight_transfer: Literal["file", "ipc"] = "file"
    """How new weights arrive: read from a safetensors file, or by CUDA IPC from a learner on the same device."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one engine."""


class OpenAIConfig(Section):
    """Settings of an OpenAI-compatible endpoint."""

    base_url: str = ""
    """Address up to and including the version, such as `http://host:8000/v1`."""
    model: str = ""
    """Name of the model at the endpoint."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; an empty name sends none."""
    endpoint: Literal["chat", "completions"] = "chat"
    """`chat` sends the prompt as one user message; `completions` sends the text after the chat template."""
    concurrency: int = Field(default=8, ge=1)
    """Requests in flight at once."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for one answer."""
    retries: int = Field(default=5, ge=0)
    """Further attempts after a failure that may pass: a busy server, a lost connection."""
    retry_wait_s: float = Field(default=1.0, gt=0)
    """Wait before the first further attempt; it doubles each time, up to a minute."""
    requests_per_minute: float = Field(default=0.0, ge=0)
    """Requests sent at most, evenly spaced, further attempts included; 0 sets no pace."""
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the endpoint calls the limit of new tokens."""


class RolloutConfig(Section):
    """Prompts, sampling, engines and their pace."""

    model: str = "smollm2-135m"
    """Checkpoint folder, .gguf file, or the name of a packaged model."""
    model_cache: str = "~/.cache/kontrast/models"
    """Folder of converted models."""
    engine: Literal["vllm", "transformers", "openai"] = "vllm"
    """What draws the samples; vLLM gives way to transformers, with one sentence in the log, where it does not work."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine runs."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of the weights; auto: bf16 where the processor multiplies it natively, else fp32."""
    cpu_threads: int = Field(default=1, ge=1)
    """Threads of an engine on CPU. More than the free cores is many times slower, not a little."""
    seed: int = 0
    """All draws follow from it, the prompt's id and the sample's index."""
    stall_timeout_s: float = Field(default=600.0, gt=0)
    """An engine that finishes no step for this long is taken for dead."""
    turns: int = Field(default=1, ge=1, le=16)
    """Answers of one sample: with more than one, what became of an answer goes back to the policy, which answers again.
    Every turn is evaluated and trained on."""
    prompt: PromptConfig = PromptConfig()
    sampling: SamplingConfig = SamplingConfig()
    staleness: StalenessConfig = StalenessConfig()
    vllm: VllmConfig = VllmConfig()
    openai: OpenAIConfig = OpenAIConfig()

    @property
    def context_tokens(self) -> int:
        """Longest conversation with its last answer, in tokens."""
        turns = self.turns * self.sampling.max_tokens + (self.turns - 1) * self.prompt.feedback_tokens
        return self.prompt.max_tokens + turns
