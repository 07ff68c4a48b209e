"""The configuration: every key, its default and its meaning. The reference in docs/ is made from this file."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class ModelConfig:
    """The policy."""

    path: str = MISSING
    """HuggingFace folder with config.json, safetensors and tokenizer."""
    dtype: str = "bf16"
    """Type of the trained weights: bf16 (fp32 main parameters in the optimizer) or fp32."""


@dataclass
class RolloutConfig:
    """Sampling of responses."""

    engine: str = "vllm"
    """Inference engine; a name of `megarl.rollout.ENGINES`."""
    replicas: int = 1
    """How many engines serve side by side."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 considers every token."""
    max_response_tokens: int = 512
    stop_token_ids: list[int] = field(default_factory=list)
    """Ends a response, beside the model's own end-of-sequence tokens."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the engine by the engine's own names (vLLM: `EngineArgs`)."""


@dataclass
class RefitConfig:
    """Moving new weights into the engines."""

    bucket_bytes: int = 512 * 1024**2
    """Size of one shared-memory bucket; two exist per host."""


@dataclass
class RewardConfig:
    """Scoring of responses."""

    function: str = "exact_match"
    """A name of `megarl.rewards.REWARDS` or path/to/file.py:name of your own function."""
    on_error: str = "stop"
    """When the function raises: stop the step, or drop the sample and count it."""
    workers: int = 8
    """Samples scored at the same time."""


@dataclass
class AlgorithmConfig:
    """The policy-gradient algorithm."""

    advantage: str = "grpo"
    normalize_by_std: bool = True
    """Divide by the group's standard deviation (GRPO); off is Dr. GRPO's form."""
    policy_loss: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    aggregation: str = "token_mean"
    kl_estimator: str = "k3"
    kl_coefficient: float = 0.0
    """Weight of the KL to the reference model in the loss; 0 keeps no reference model."""
    entropy_coefficient: float = 0.0
    updates_per_step: int = 1
    """Optimizer steps per rollout; the prompts of a step are cut into this many mini-batches."""


@dataclass
class DataConfig:
    """Prompts, from parquet files with the columns data_source, prompt, reward_model, extra_info."""

    train_files: list[str] = field(default_factory=list)
    eval_files: list[str] = field(default_factory=list)
    prompt_column: str = "prompt"
    max_prompt_tokens: int = 1024
    overlong_prompts: str = "refuse"
    """A prompt longer than max_prompt_tokens: refuse stops before training, drop leaves it out and counts it."""
    shuffle: bool = True


@dataclass
class LoopConfig:
    """How long, how much, how often."""

    steps: int = 100
    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    max_tokens_per_micro_batch: int = 16384
    """Tokens of one packed micro-batch on one data-parallel rank."""
    eval_every: int = 10
    """Greedy evaluation on eval_files every so many steps; 0 never."""
    eval_at_start: bool = True
    seed: int = 0


@dataclass
class SftConfig:
    """Supervised fine-tuning (`megarl sft`)."""

    train_files: list[str] = field(default_factory=list)
    """Parquet files with a chat list in `messages_column`."""
    eval_files: list[str] = field(default_factory=list)
    messages_column: str = "messages"
    steps: int = 100
    sequences_per_step: int = 128
    eval_every: int = 25
    stop_at_exact_match: float | None = None
    """End as soon as greedy decoding would reproduce this share of the eval responses exactly."""


@dataclass
class ClusterConfig:
    """Where the processes run."""

    trainer_ranks: int = 1
    """Megatron ranks: TP x PP x DP."""
    address: str | None = None
    """Address of a running Ray cluster; without one, a cluster of this machine alone is started on loopback."""
    trainer_cpus: float = 1.0
    engine_cpus: float = 1.0
    start_timeout_s: float = 300.0


@dataclass
class CheckpointConfig:
    """Saving and resuming."""

    every: int = 0
    """Steps between checkpoints; 0 saves only the last step."""
    keep: int = 2
    """How many of the newest checkpoints stay."""
    resume: str = "auto"
    """auto continues from the latest checkpoint in output_dir, never starts anew."""


@dataclass
class TrackingConfig:
    """Where metrics go."""

    loggers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    """Names of `megarl.tracking.LOGGERS`: console, jsonl, tensorboard, wandb, mlflow."""
    project: str = "megarl"
    run_name: str = "run"


@dataclass
class MegarlConfig:
    """One run."""

    output_dir: str = MISSING
    """Everything the run writes: metrics, checkpoints, exports."""
    model: ModelConfig = field(default_factory=ModelConfig)
    megatron: dict[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig, OptimizerConfig, DistributedDataParallelConfig and of its learning
    rate scheduler, by their own names."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
