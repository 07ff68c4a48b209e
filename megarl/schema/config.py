"""The configuration: every key, its default and its meaning. The reference in docs/ is generated from it."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from megarl.schema.algorithm import (
    AlgorithmConfig,
    CriticConfig,
    ImplicitRewardModelConfig,
    PreferenceConfig,
    RewardModelConfig,
    TeacherConfig,
)
from megarl.schema.cluster import ClusterConfig


@dataclass
class ModelConfig:
    """The policy."""

    path: str = MISSING
    """HuggingFace folder with config.json, safetensors and tokenizer."""
    name: str | None = None
    """Model that the recipe is for, a file of configs/models/. A model of other sizes is refused, since its memory and
    parallel sizes differ; null accepts any."""
    megatron_checkpoint: str | None = None
    """Checkpoint with the initial weights in Megatron's torch_dist format, of any layout (`megarl convert` writes one).
    On one machine `path` then needs no safetensors; on several it needs the same weights."""
    dtype: str = "bf16"
    """Type of the trained weights: bf16 (fp32 main parameters in the optimizer) or fp32."""
    fp32_logits: bool = False
    """Keep logits in fp32 in the trainer and in the engines, so that their log-probs differ less."""
    mtp_training: str = "detached"
    """Training of multi-token-prediction layers, if the policy has them: detached, their loss trains only these layers;
    joint, it trains the model under them, too; none leaves them as loaded."""
    freeze_moe_router: bool = False
    """Freeze the routers of all models of the run: no gradient, no weight decay."""


@dataclass
class LoraConfig:
    """A low-rank adapter (LoRA, arXiv 2106.09685) that is trained instead of the policy's weights."""

    rank: int = 0
    """Rank of the factors A and B of every adapted matrix; 0 trains the weights themselves."""
    alpha: float = 32.0
    """An adapted matrix W acts as W + alpha / rank * B A."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Adapted matrices, by the ends of their HuggingFace names, as in PEFT: q_proj, experts' gate_proj, ...; all-linear
    is every matrix of the layers except routers."""
    path: str | None = None
    """PEFT folder of the initial adapter, which sets rank, alpha and target_modules; null starts with B = 0."""
    merge: bool = True
    """true sends the engines whole weights with B A added. false has them load the weights of model.path once, and each
    refit moves only A and B, into a LoRA slot of the engine."""


@dataclass
class RolloutConfig:
    """Sampling of responses."""

    engine: str = "vllm"
    """Inference engine; a name of `megarl.rollout.ENGINES`."""
    replicas: int = 1
    """Number of engines, each a replica of the policy."""
    weights: str = "as_trained"
    """Form of the weights in the engines: as_trained, or a format in which the matrices of the layers are quantized
    codes with scales: fp8_block (e4m3, a scale per 128 x 128), fp8_block_ue8m0 (the same with power-of-two scales, for
    DeepGEMM), int8_channel (int8, a scale per row), mxfp8 (e4m3, a power-of-two scale per 32 of a row) or nvfp4 (e2m1,
    a scale per 16 of a row). Every refit quantizes the weights on their way."""
    kv_scales: str = "unit"
    """Scales of keys and values if engine_args.kv_cache_dtype is FP8: unit, always 1, which saturates values beyond
    448; bound, for each layer a power of two for which, by its weights, no value can saturate, recomputed with every
    refit."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts; for evaluations see loop.eval_temperature."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the likeliest tokens with this share of the probability; evaluations always use 1,
    all of it."""
    top_k: int = -1
    """Sample from this many of the likeliest tokens; -1 is all tokens, which evaluations always use."""
    max_response_tokens: int = 512
    """Length limit of a response, including its end token."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a response, in addition to the model's own end-of-sequence tokens."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the engine by its own names (vLLM: `EngineArgs`; SGLang: `ServerArgs`; transformers:
    `TransformersArguments`)."""


@dataclass
class RefitConfig:
    """Moving new weights from the trainer into the engines."""

    path: str = "auto"
    """How weights get into an engine: direct writes each shard to where the engine keeps it; loader gives whole tensors
    to the engine's own loader; auto is direct if the engine can tell where it keeps every tensor, else loader. On one
    machine the first refit of an engine goes through the loader; between machines no refit does."""
    transport: str = "auto"
    """Transport of direct refits: shared_memory and cuda_ipc, memory of one machine that both sides have mapped; rdma,
    one-sided reads by NIXL over InfiniBand or any other network that UCX finds; tcp, sends by gloo. auto is mapped
    memory on one machine; between machines it is rdma, or tcp if NIXL is not installed or a process has no port of
    InfiniBand, RoCE or EFA. With several machines, every transport uses mapped memory for data that stays on one."""
    bucket_bytes: int = 512 * 1024**2
    """Size of a transfer buffer, at most 4 GiB. Each rank has at most two, or four of half the size if the workers of a
    node relay to each other what all of them need; a buffer is never larger than what a rank sends at once."""
    verify: str = "checksum"
    """Check of direct refits: checksum compares checksums of each bucket before and after the transfer; logprobs has
    the trainer score a few greedy tokens of the engines after every refit; off checks nothing."""
    delta: bool = False
    """Whether direct refits send only the changes since the last refit, if these take fewer bytes, and always verify
    checksums of whole messages. Pays over slow networks, with weights in bf16 or a number format. Each rank keeps its
    last sent weights in host memory. A new engine, or one that was cut off, gets all weights."""
    log_prob_tolerance: float = 0.05
    """With verify=logprobs, the largest mean difference between engine and trainer, in nats per token."""
    timeout_s: float = 600.0
    """Seconds that ranks wait for any sign of each other, and for what an engine does by itself, such as loading."""


@dataclass
class RewardTermConfig:
    """One term of a reward that is a weighted sum."""

    function: str = MISSING
    """A name of `megarl.rewards.REWARDS` or path/to/file.py:name of your own function."""
    weight: float = 1.0
    """Weight of the term; the reward of a response is the weighted sum of its terms."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    data_sources: list[str] = field(default_factory=list)
    """Values of the column data_source that this term is for; `aime*` is all that begin with aime; empty is all."""


@dataclass
class RewardConfig:
    """Scoring of responses."""

    function: str = "exact_match"
    """A name of `megarl.rewards.REWARDS` or path/to/file.py:name of your own function."""
    functions: dict[str, RewardTermConfig] = field(default_factory=dict)
    """Several named rewards instead of `function`."""
    answer_after: str = ""
    """Built-in rewards that look for an answer search the text after the last occurrence of this, such as `</think>`,
    and score a response without it 0; empty searches the whole response."""
    on_error: str = "stop"
    """If the function raises: stop the step, or drop the sample and count it."""
    on_timeout: str = "zero"
    """If a sample takes longer than `timeout_s`: score it zero, drop it, or stop the step. It is counted. Responses
    that are slow to score are mostly long; dropping them would bias the mean of their group and the evaluation."""
    timeout_s: float = 60.0
    """Time limit for scoring one sample, in seconds."""
    workers: int = 8
    """Processes that run plain functions, each one sample at a time."""
    async_samples: int = 256
    """Samples that async functions score concurrently: limits the requests in flight to a judge behind a server."""
    overlong_buffer_tokens: int = 0
    """Soft penalty for long responses (DAPO): grows linearly over this many last tokens before max_response_tokens;
    0 is none."""
    overlong_penalty: float = 1.0
    """Penalty of a response of full length, subtracted from its reward. In a group, only its ratio to the difference
    between right and wrong answers matters: DAPO's 1, for rewards of 1 and -1, is 0.5 for rewards of 1 and 0."""


@dataclass
class DataConfig:
    """Prompts, from parquet files with the columns data_source, prompt, reward_model, extra_info."""

    train_files: list[str] = field(default_factory=list)
    """Prompts to train on."""
    eval_files: list[str] = field(default_factory=list)
    """Held-out prompts."""
    prompt_column: str = "prompt"
    """Column of the prompts, each a chat list of roles and contents."""
    max_prompt_tokens: int = 1024
    """Length limit of a prompt, with its chat template."""
    overlong_prompts: str = "refuse"
    """For a prompt longer than max_prompt_tokens: refuse stops before training, drop leaves it out and counts it."""
    shuffle: bool = True
    """Draw the data in a new random order every epoch."""


@dataclass
class LoopConfig:
    """Steps, batch sizes and evaluation of a run."""

    steps: int = 100
    """Steps of the whole run, each of rollout, reward, log-probs, advantage, update and refit."""
    prompts_per_step: int = 64
    """Prompts per step."""
    samples_per_prompt: int = 8
    """Responses to each prompt; for GRPO the group size."""
    max_tokens_per_micro_batch: int = 16384
    """Maximum tokens of a packed micro-batch on one data-parallel rank; context-parallel ranks divide them."""
    shared_prefixes: bool = False
    """Compute a prompt once for all responses to it in a micro-batch, and likewise any other prefix that sequences
    share; results differ only by rounding."""
    eval_every: int = 10
    """Evaluate on eval_files every this many steps and after the last; 0 never evaluates."""
    eval_at_start: bool = True
    """Evaluate before the first step, too."""
    eval_samples: int = 1
    """Responses to each held-out prompt; more than one give pass@k, mean@k, majority@k and best@k."""
    eval_temperature: float | None = None
    """Temperature of these responses; null decodes a single response greedily, and samples several at 1."""
    seed: int = 0
    """Seed of the data order and of sampling."""


@dataclass
class ScheduleConfig:
    """When prompts are sampled and trained on (`megarl train`)."""

    max_staleness: int = 0
    """How many versions older than the trainer's the weights that sampled a trained token may be: engines sample the
    prompts of this many steps ahead while the trainer learns. 0 alternates between sampling and learning."""
    window: int = 1
    """How far a batch may reorder: it may skip groups that are still being sampled, as long as fewer than this many
    later groups are trained before any of them. 1 trains strictly in the order of the draws. Adds up to
    ceil((window - 1) / prompts_per_step) versions of staleness."""
    in_flight: str = "wait"
    """Responses in flight when new weights arrive: wait finishes them first; recompute continues them with the new
    weights, with which the engine recomputes their KV cache; keep continues them on the KV cache of the older weights,
    so nothing is computed twice, but no single policy is exactly the one that sampled. Engines that share GPUs with the
    trainer lose their KV cache while it learns, so they cannot keep it."""
    corrected: bool = True
    """With max_staleness above 0 and nothing else that weights for it, add importance weights truncated at 2 to
    algorithm.corrections, beside any masks there: token_importance, or sequence_mean_importance for losses with one
    ratio per response."""


@dataclass
class SftConfig:
    """Supervised fine-tuning (`megarl sft`)."""

    train_files: list[str] = field(default_factory=list)
    """Parquet files with a chat list in `messages_column`."""
    eval_files: list[str] = field(default_factory=list)
    """Held-out conversations, of the same form."""
    messages_column: str = "messages"
    """Column of the conversations."""
    steps: int = 100
    """Maximum number of optimizer steps."""
    sequences_per_step: int = 128
    """Conversations per optimizer step."""
    eval_every: int = 25
    """Steps between evaluations on eval_files."""
    stop_at_exact_match: float | None = None
    """Stop once greedy decoding would reproduce all replies of this share of the held-out conversations exactly."""


@dataclass
class CheckpointConfig:
    """Saving and resuming."""

    every: int = 0
    """Steps between checkpoints; 0 saves only the last step."""
    keep_last: int = 2
    """How many of the newest checkpoints are kept."""
    keep_every: int = 0
    """Also keep, for good, checkpoints of steps that are multiples of this; 0 keeps none."""
    async_save: bool = False
    """Write checkpoints while the run goes on. Each rank then holds a copy of what it saves in host memory, made during
    the next rollout."""
    resume: str = "auto"
    """`auto` resumes from the newest checkpoint in output_dir, or starts a new run if there is none. `never` starts a
    new run, and refuses a folder that has checkpoints."""
    on_signal: bool = False
    """true: on SIGTERM or SIGHUP the run finishes and saves the current step before it ends, and in a Slurm job it
    saves and ends by itself when the time left is too short for another step. false: these signals end it at once."""


@dataclass
class TrackingConfig:
    """Where metrics go."""

    loggers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    """Names of `megarl.tracking.LOGGERS`: console, jsonl, tensorboard, wandb, mlflow."""
    project: str = "megarl"
    """Project in wandb, experiment in mlflow."""
    run_name: str = "run"
    """Name of the run in wandb and mlflow."""
    warn_after_steps: int = 3
    """Steps in a row that a metric must be bad before a warning, and good again before the warning ends."""
    warn_entropy_fraction: float | None = 0.1
    """Warn if policy/entropy falls below this share of its first value in the run; null never does."""
    warn_kl_to_reference: float | None = 1.0
    """Warn if policy/kl_to_reference, in nats per token, is above this; null never does."""
    warn_kl_to_old: float | None = 0.1
    """Warn if policy/kl_to_old, in nats per token, is above this; null never does."""
    warn_log_prob_difference: float | None = 0.05
    """Warn if log_prob_difference/mean, in nats, is above this; null never does."""
    warn_no_signal: float | None = 0.9
    """Warn if the share of groups whose rewards are all equal is above this; null never does."""
    warn_truncated_fraction: float | None = 0.5
    """Warn if the share of responses truncated at max_response_tokens is above this; null never does."""
    warn_timed_out_fraction: float | None = 0.5
    """Warn if reward/undecided_fraction, of responses that took too long to score, is above this; null never does."""
    warn_expert_imbalance: float | None = 8.0
    """Warn if experts/imbalance_mean, the load of the busiest expert over the mean, is above this; null never does."""
    profile: int | None = None
    """Step whose processes are recorded in a timeline for Perfetto, profiles/step_N.json; null is none."""
    peak_tflops: float | None = None
    """Peak bf16 TFLOP/s of a rank's GPU, for throughput/mfu; null takes the data sheet's value for known GPUs."""


@dataclass
class MegarlConfig:
    """One run."""

    output_dir: str = MISSING
    """Folder of everything the run writes: metrics, checkpoints, exports."""
    model: ModelConfig = field(default_factory=ModelConfig)
    megatron: dict[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig and of its
    learning-rate scheduler, by their own names."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teachers: dict[str, TeacherConfig] = field(default_factory=dict)
    """Teachers that the policy is distilled from, under names of your choice."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    implicit_reward_model: ImplicitRewardModelConfig = field(default_factory=ImplicitRewardModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
