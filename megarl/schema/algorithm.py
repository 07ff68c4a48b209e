"""Keys of the algorithm and of the models it learns from, part of `megarl.schema`."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class CorrectionConfig:
    """One correction for the mismatch between the log-probs of engine and trainer."""

    kind: str = MISSING
    """A name of `megarl.algorithms.CORRECTIONS`."""
    low: float | None = None
    """Lower bound, if the kind has one."""
    high: float | None = None
    """Upper bound, if the kind has one."""


@dataclass
class AlgorithmConfig:
    """The policy-gradient algorithm."""

    advantage: str = "grpo"
    """A name of `megarl.algorithms.ADVANTAGES`."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Options of the advantage, by the names that docs/algorithms.md gives for it, such as gae_lambda."""
    policy_loss: str = "clip"
    """A name of `megarl.algorithms.POLICY_LOSSES`."""
    policy_loss_options: dict[str, Any] = field(default_factory=dict)
    """Options of the policy loss, by the names that docs/algorithms.md gives for it, such as clip_high."""
    ratio_to: str = "old"
    """Policy in the denominator of ratios: old, the trainer's before the step's first update; rollout, the engine's as
    it sampled; interpolated, an estimate of old, interpolated by staleness between the engine's and the current one."""
    aggregation: str = "token_mean"
    """How token losses are reduced to one; a name of `megarl.algorithms.AGGREGATIONS`."""
    aggregation_options: dict[str, Any] = field(default_factory=dict)
    """Options of the aggregation, by the names that docs/algorithms.md gives for it."""
    kl_estimator: str = "k3"
    """A name of `megarl.algorithms.KL_ESTIMATORS`."""
    kl_coefficient: float = 0.0
    """Weight of the KL to the reference model; with 0 the KL needs no reference model."""
    kl_in: str = "loss"
    """Where the KL to the reference is applied: loss, or reward (subtracted from the reward of each token)."""
    kl_unbiased: bool = False
    """Multiply the KL in the loss by the ratio to the policy that sampled, so that value and gradient are unbiased
    off-policy too (DeepSeek-V3.2); only with kl_estimator k1 or k3."""
    kl_target: float | None = None
    """KL per token, in nats, that kl_coefficient is adapted towards; null keeps the coefficient fixed."""
    kl_horizon: int = 10000
    """How slowly kl_coefficient adapts, in responses: a step of this many or more changes it by at most 20 %."""
    refresh_reference_every: int = 0
    """Make the current policy the reference every this many steps (self-play, iterative training); 0 never does."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus in the loss."""
    corrections: list[CorrectionConfig] = field(default_factory=list)
    """Factors on the policy loss for the mismatch between the log-probs of engine and trainer; they are multiplied."""
    off_policy_mask: float | None = None
    """Mask tokens in the policy loss if their advantage is negative and, in the mean over their response, the engine's
    log-probs exceed those of the current policy by more than this, in nats (DeepSeek-V3.2); null masks none."""
    distillation_coefficient: float = 0.0
    """Weight of log pi_teacher - log pi_old, in nats, which is added to the advantage of each token; needs teachers."""
    dynamic_sampling: bool = False
    """Replace groups that teach nothing (see filter_on) by sampling further prompts (DAPO)."""
    max_refills: int = 10
    """With dynamic_sampling: replace at most this times prompts_per_step prompts for a step; more stop the run."""
    filter_groups: bool = False
    """Leave groups that teach nothing (see filter_on) out of the loss and its denominators, without sampling others in
    their place (ScaleRL)."""
    filter_on: str = "outcome"
    """With dynamic_sampling or filter_groups, a group teaches nothing if all its responses have the same value of this:
    outcome, the reward without the overlong penalty and the score of a reward model; reward, the whole reward; or the
    name of a term or part of the reward."""
    filter_low: float | None = None
    """A group with a mean of filter_on below this teaches nothing either."""
    filter_high: float | None = None
    """A group with a mean of filter_on above this teaches nothing either (PRIME: 0.2 to 0.8)."""
    train_on_truncated_responses: bool = True
    """false leaves responses that reached max_response_tokens out of the loss (DAPO)."""
    truncated_responses_in_statistics: bool = True
    """Whether truncated responses that are not trained on still count in the statistics of their group (DAPO). false
    excludes them there, too, so that the advantages of the responses that are trained on are centered."""
    router_replay: str = "none"
    """Experts of the policy's tokens in training: none, the choice of its own routers; rollout, the experts that the
    engine chose while sampling (R3, arXiv 2510.11370), with gate weights of the policy's routers, which still learn."""
    updates_per_step: int = 1
    """Optimizer steps per rollout; the prompts of a step are split into this many mini-batches."""


@dataclass
class CriticConfig:
    """The value model, for advantages that need one (gae)."""

    path: str | None = None
    """HuggingFace folder with the initial weights; by default the policy's."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Options that differ from those of the group `megatron`: parallel sizes, lr, ..."""
    ranks: int | None = None
    """Megatron ranks; by default as many as the policy's."""
    value_clip: float | None = 0.5
    """Clip new values to at most this distance from the old ones in the loss (PPO's value clipping); null does not."""
    warmup_steps: int = 0
    """First steps in which only the critic is trained; the schedule of the policy's learning rate covers the steps
    after them."""


@dataclass
class TeacherConfig:
    """A teacher for on-policy distillation: the policy is distilled from it on responses that the policy samples."""

    path: str = MISSING
    """HuggingFace folder; its tokenizer must be the policy's."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Options that differ from those of the group `megatron`."""
    ranks: int | None = None
    """Megatron ranks; by default as many as the policy's."""
    data_sources: list[str] = field(default_factory=list)
    """Values of the column data_source that this teacher is for; empty is all."""

    def teaches(self, data_source: str) -> bool:
        """Whether this teacher is for prompts of `data_source`."""
        return not self.data_sources or data_source in self.data_sources


@dataclass
class RewardModelConfig:
    """A frozen model that scores responses, such as one that `megarl reward-model` has trained."""

    path: str | None = None
    """HuggingFace folder; null is no reward model."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Options that differ from those of the group `megatron`."""
    ranks: int | None = None
    """Megatron ranks; by default as many as the policy's."""
    weight: float = 1.0
    """Weight of the model's score, which is added to the other rewards."""


@dataclass
class ImplicitRewardModelConfig:
    """The reward model that is trained online to reward single tokens, for advantages that need one (prime)."""

    path: str | None = None
    """HuggingFace folder with the initial weights; by default model.path."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Options that differ from those of the group `megatron`."""
    ranks: int | None = None
    """Megatron ranks; by default as many as the policy's."""
    beta: float = 0.05
    """The reward of a token is this times the log-ratio between the model and its initial state."""


@dataclass
class PreferenceConfig:
    """Training on preference pairs (`megarl dpo`, `megarl reward-model`) and by self-play (`megarl spin`)."""

    train_files: list[str] = field(default_factory=list)
    """Parquet files of pairs, or for `megarl spin` of conversations (as `sft.train_files`)."""
    eval_files: list[str] = field(default_factory=list)
    """Held-out pairs or conversations, of the same form."""
    prompt_column: str = "prompt"
    """Column of the prompts, each a chat list."""
    chosen_column: str = "chosen"
    """Column of the better replies, each a text or a chat list."""
    rejected_column: str = "rejected"
    """Column of the worse replies."""
    messages_column: str = "messages"
    """Column of the conversations of `megarl spin`."""
    steps: int = 100
    """Optimizer steps."""
    pairs_per_step: int = 64
    """Pairs per optimizer step."""
    eval_every: int = 25
    """Steps between evaluations on eval_files."""
    beta: float = 0.1
    """Weight of the log-ratio to the reference (DPO, SPIN)."""
    label_smoothing: float = 0.0
    """Share of pairs whose preference is assumed to be wrong (conservative DPO)."""
    steps_per_generation: int = 10
    """Optimizer steps of `megarl spin` before the current policy becomes the opponent."""
