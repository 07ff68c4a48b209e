"""The configuration: every key, its default and its meaning. The reference in docs/ is made from it."""

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
    """Model whose sizes the recipe is for, a file of configs/models/: one of other sizes is refused, as its memory and
    its parallel sizes are others. null takes any."""
    megatron_checkpoint: str | None = None
    """Checkpoint in Megatron's torch_dist format whose weights are trained, of any layout (`megarl convert` makes one);
    `path` then needs no safetensors on one machine; between several, it needs the same weights."""
    dtype: str = "bf16"
    """Type of the trained weights: bf16 (fp32 main parameters in the optimizer) or fp32."""
    fp32_logits: bool = False
    """Logits are not rounded to bf16, in the trainer and in the engines: their log-probabilities then differ less."""
    mtp_training: str = "detached"
    """Training of layers for multi-token prediction, where the policy has them: detached, only these layers learn from
    their loss; joint, the model under them too; none, they stay as they were loaded."""
    freeze_moe_router: bool = False
    """The routers of all models of the run stay as they were loaded: no gradient, no weight decay."""


@dataclass
class LoraConfig:
    """A low-rank adapter (LoRA, arXiv 2106.09685) that is trained instead of the policy's weights."""

    rank: int = 0
    """Rank of A and B beside every adapted matrix; 0 trains the weights themselves."""
    alpha: float = 32.0
    """A matrix W counts as W + alpha / rank * B A."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Matrices that are adapted, by the ends of their HuggingFace names, as in PEFT: q_proj, experts' gate_proj, ...;
    all-linear is all of the layers but routers."""
    path: str | None = None
    """PEFT folder of an adapter to begin with, which says the rank, alpha and targets; null begins with B = 0."""
    merge: bool = True
    """Engines get whole weights with B A added; false: they load the weights of model.path once, and each refit moves A
    and B alone, into a LoRA slot of theirs."""


@dataclass
class RolloutConfig:
    """Sampling of responses."""

    engine: str = "vllm"
    """Inference engine; a name of `megarl.rollout.ENGINES`."""
    replicas: int = 1
    """How many engines serve side by side."""
    weights: str = "as_trained"
    """Form in which the engines hold the weights: as_trained, or a number format, in which the matrices of the layers
    are codes with scales: fp8_block (e4m3, a scale for every 128 x 128), fp8_block_ue8m0 (the same with scales that are
    powers of two, for DeepGEMM), int8_channel (whole numbers, a scale for every row), mxfp8 (e4m3, a power of two for
    every 32 of a row) or nvfp4 (e2m1, a scale for every 16 of a row). Every refit quantises them on their way."""
    kv_scales: str = "unit"
    """Scales of keys and values where engine_args.kv_cache_dtype has them in FP8: unit, which are 1, so that what lies
    beyond 448 becomes 448; bound, for each layer the power of two with which by its weights none lies beyond, computed
    anew with every refit."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts; for evaluations see loop.eval_temperature."""
    top_p: float = 1.0
    """Share of the probability that is sampled from; 1 is all of it, which evaluations always sample from."""
    top_k: int = -1
    """How many of the likeliest tokens are sampled from; -1 is every token, as always in evaluations."""
    max_response_tokens: int = 512
    """Longest response, its end token included."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Ends a response, beside the model's own end-of-sequence tokens."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the engine by the engine's own names (vLLM: `EngineArgs`; SGLang: `ServerArgs`; transformers:
    `TransformersArguments`)."""


@dataclass
class RefitConfig:
    """Moving new weights into the engines."""

    path: str = "auto"
    """How weights get into an engine: direct sends each shard straight to where the engine keeps it, loader gives
    whole tensors to the engine's own loader. auto is direct where the engine can say where it keeps every tensor,
    else loader. On one machine the first refit of an engine goes through the loader, between machines none does."""
    transport: str = "auto"
    """Transport of direct refits: shared_memory and cuda_ipc, memory of one machine that both sides have mapped; rdma,
    one-sided reads by NIXL over InfiniBand, or what else UCX finds; tcp, sends by gloo. auto is mapped memory on one
    machine, and between machines rdma, or tcp where NIXL is not installed or a process has no port of InfiniBand, RoCE
    or EFA; with several machines, what stays on one goes through mapped memory by any."""
    bucket_bytes: int = 512 * 1024**2
    """Size of a bucket, 4 GiB at most; each rank has two at most, or four of half the size where workers of a node
    relay to each other what they all need. None is larger than what a rank sends at once."""
    verify: str = "checksum"
    """How direct refits are checked: checksum compares those of each bucket before and after its way, logprobs lets
    the trainer score a few greedy tokens of the engines after every refit, off does neither."""
    delta: bool = False
    """Whether direct refits move the changes of the weights since the refit before, where these are fewer bytes, and
    always check the sums of whole messages. It pays over slow networks, with weights in bf16 or a number format. Each
    rank keeps what it sent last in the host's memory. An engine that is new, or was cut off, gets everything."""
    log_prob_tolerance: float = 0.05
    """With verify=logprobs, the largest mean difference between engine and trainer, in nats per token."""
    timeout_s: float = 600.0
    """How long ranks wait for any sign of each other, and for an engine in what it does by itself, such as to load."""


@dataclass
class RewardTermConfig:
    """One of several named rewards."""

    function: str = MISSING
    """A name of `megarl.rewards.REWARDS` or path/to/file.py:name of your own function."""
    weight: float = 1.0
    """The reward of a response is the sum of its terms by their weights."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, by its own names."""
    data_sources: list[str] = field(default_factory=list)
    """The values of the column data_source that this term is for, `aime*` all that begin so; empty is all."""


@dataclass
class RewardConfig:
    """Scoring of responses."""

    function: str = "exact_match"
    """A name of `megarl.rewards.REWARDS` or path/to/file.py:name of your own function."""
    functions: dict[str, RewardTermConfig] = field(default_factory=dict)
    """Several named rewards instead of `function`."""
    answer_after: str = ""
    """Built-in rewards that look for an answer read what stands behind the last of these, such as `</think>`, and score
    a response without it 0; empty is the whole response."""
    on_error: str = "stop"
    """When the function raises: stop the step, or drop the sample and count it."""
    on_timeout: str = "zero"
    """When a sample takes longer than `timeout_s`: score it zero, drop it, or stop the step. It is counted.
    Responses that are slow to score are mostly long: dropped, they would be missing from their group's mean and from
    the evaluation."""
    timeout_s: float = 60.0
    """How long the scoring of one sample may take, in seconds."""
    workers: int = 8
    """Processes that score with plain functions, each a sample at a time."""
    async_samples: int = 256
    """Samples that async functions score at the same time: as many requests as a judge behind a server is to get."""
    overlong_buffer_tokens: int = 0
    """Soft penalty of long responses (DAPO): it grows linearly over the last so many of max_response_tokens; 0 is
    none."""
    overlong_penalty: float = 1.0
    """The penalty of a response of full length, subtracted from its reward. Groups see only its share of the difference
    between right and wrong answers: DAPO's 1, where they are worth 1 and -1, is 0.5 where they are worth 1 and 0."""


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
    """Longest prompt, in the chat template."""
    overlong_prompts: str = "refuse"
    """A prompt longer than max_prompt_tokens: refuse stops before training, drop leaves it out and counts it."""
    shuffle: bool = True
    """Draw the data in a new random order every epoch."""


@dataclass
class LoopConfig:
    """How long, how much, how often."""

    steps: int = 100
    """Steps of the whole run: rollout, reward, log-probs, advantage, update, refit."""
    prompts_per_step: int = 64
    """Prompts of one rollout."""
    samples_per_prompt: int = 8
    """Responses to each prompt; for GRPO the size of a group."""
    max_tokens_per_micro_batch: int = 16384
    """Tokens of one packed micro-batch on one data-parallel rank; context-parallel ranks have a part of them each."""
    shared_prefixes: bool = False
    """The trainer computes a prompt once for all responses to it that are in a micro-batch, and so other beginnings
    that sequences share; results differ by rounding alone."""
    eval_every: int = 10
    """Evaluation on eval_files every so many steps; 0 never."""
    eval_at_start: bool = True
    """Evaluate before the first step, too."""
    eval_samples: int = 1
    """Responses to each held-out prompt; several give pass@k, mean@k, majority@k, best@k."""
    eval_temperature: float | None = None
    """Temperature of these responses; without one, a single response is greedy and several have 1."""
    seed: int = 0
    """Seed of the data order and of sampling."""


@dataclass
class ScheduleConfig:
    """When prompts are sampled and trained on (`megarl train`)."""

    max_staleness: int = 0
    """Maximum age, in weight versions, of the policy that sampled a trained token: the engines sample the prompts of so
    many steps ahead while the trainer learns. 0 samples and learns in turn."""
    window: int = 1
    """A batch may pass over groups that are still being sampled, but fewer than this many later groups may be trained
    before any of them. 1: strictly in the order of the draws. Adds up to ceil((window - 1) / prompts_per_step) versions
    of staleness."""
    in_flight: str = "wait"
    """Responses that are being sampled when new weights come: wait lets them end first; recompute lets them go on with
    the new weights, under which the engine computes their keys and values anew; keep lets them go on with the keys and
    values that they have, of older weights: nothing is computed twice, and no policy is exactly that which sampled.
    Engines that share GPUs with the trainer are cut off from them while it learns, and cannot keep anything."""
    corrected: bool = True
    """With max_staleness above 0 and nothing else that weighs for it, adds truncated importance weights up to 2 to
    algorithm.corrections, beside the masks there: token_importance, or sequence_mean_importance for losses with one
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
    """Optimizer steps at most."""
    sequences_per_step: int = 128
    """Conversations of one optimizer step."""
    eval_every: int = 25
    """Steps between measurements on eval_files."""
    stop_at_exact_match: float | None = None
    """End as soon as greedy decoding would reproduce this share of the eval responses exactly."""


@dataclass
class CheckpointConfig:
    """Saving and resuming."""

    every: int = 0
    """Steps between checkpoints; 0 saves only the last step."""
    keep_last: int = 2
    """How many of the newest checkpoints stay."""
    keep_every: int = 0
    """Checkpoints of steps that this number divides stay for good; 0 is none."""
    async_save: bool = False
    """Checkpoints are written while the run goes on. Each rank then keeps a copy of what it saves in host memory, made
    beside the next rollout."""
    resume: str = "auto"
    """`auto` goes on from the newest checkpoint in output_dir, and starts where there is none. `never` starts, and is
    refused in a folder that has checkpoints."""
    on_signal: bool = False
    """On, SIGTERM and SIGHUP let the present step end and be saved before the run ends, and in a Slurm job the run
    saves and ends by itself when its time is too short for another step. Off, these signals end it at once."""


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
    """Steps in a row that a metric has to be bad before a warning, and good before it ends."""
    warn_entropy_fraction: float | None = 0.1
    """Warn if policy/entropy falls below this share of the run's first; null never does."""
    warn_kl_to_reference: float | None = 1.0
    """Warn if policy/kl_to_reference, in nats per token, is above this; null never does."""
    warn_kl_to_old: float | None = 0.1
    """Warn if policy/kl_to_old, in nats per token, is above this; null never does."""
    warn_log_prob_difference: float | None = 0.05
    """Warn if log_prob_difference/mean, in nats, is above this; null never does."""
    warn_no_signal: float | None = 0.9
    """Warn if the share of groups without a difference in reward is above this; null never does."""
    warn_truncated_fraction: float | None = 0.5
    """Warn if the share of responses that ran into the limit is above this; null never does."""
    warn_timed_out_fraction: float | None = 0.5
    """Warn if reward/undecided_fraction, of responses that took too long to score, is above this; null never does."""
    warn_expert_imbalance: float | None = 8.0
    """Warn if experts/imbalance_mean, a busiest expert's load over the mean, is above this; null never does."""
    profile: int | None = None
    """Step of which a timeline is written, of its processes, for Perfetto: profiles/step_N.json; null is none."""
    peak_tflops: float | None = None
    """Peak of a rank's GPU in bfloat16, for throughput/mfu; null takes the data sheet's of a known GPU."""


@dataclass
class MegarlConfig:
    """One run."""

    output_dir: str = MISSING
    """Everything the run writes: metrics, checkpoints, exports."""
    model: ModelConfig = field(default_factory=ModelConfig)
    megatron: dict[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig, OptimizerConfig, DistributedDataParallelConfig and of its learning
    rate scheduler, by their own names."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teachers: dict[str, TeacherConfig] = field(default_factory=dict)
    """Models that the policy is distilled from, by names of your own."""
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
