"""The part of the schema that says what is learned, from which models: see `megarl.schema`."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class CorrectionConfig:
    """One factor for the difference between the engine's log-probs and the trainer's."""

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
    """The policy that ratios and clips compare with: old, the trainer's own before the step's first update; rollout,
    the engine's as it sampled; interpolated, an estimate of old between that and the present one, by the versions."""
    aggregation: str = "token_mean"
    """How the losses of tokens become one; a name of `megarl.algorithms.AGGREGATIONS`."""
    aggregation_options: dict[str, Any] = field(default_factory=dict)
    """Options of the aggregation, by the names that docs/algorithms.md gives for it."""
    kl_estimator: str = "k3"
    """A name of `megarl.algorithms.KL_ESTIMATORS`."""
    kl_coefficient: float = 0.0
    """Weight of the KL to the reference model; 0 keeps no reference model."""
    kl_in: str = "loss"
    """Where the KL to the reference goes: loss, or reward (subtracted from the reward of each token)."""
    kl_unbiased: bool = False
    """Multiply the KL in the loss by the ratio to the policy that sampled, so that value and gradient are unbiased
    off-policy too (DeepSeek-V3.2); for the estimators k1 and k3."""
    kl_target: float | None = None
    """Adapt the coefficient, towards this KL per token; without it the coefficient is fixed."""
    kl_horizon: int = 10000
    """How slowly the coefficient adapts, in responses: a step of so many, or more, changes it by a fifth at most."""
    refresh_reference_every: int = 0
    """Steps after which the present policy becomes the reference (self-play, iterative training); 0 is never."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus in the loss."""
    corrections: list[CorrectionConfig] = field(default_factory=list)
    """Factors on the loss for the difference between the engine's log-probs and the trainer's, multiplied."""
    off_policy_mask: float | None = None
    """Leave responses out of the policy loss whose advantage is negative and whose log-probs under the engine exceed
    those under the present policy by more than this in the mean, in nats (DeepSeek-V3.2); none without."""
    distillation_coefficient: float = 0.0
    """Weight of log pi_teacher - log pi_old, in nats, in the advantage of a token, beside the reward's; it needs
    teachers."""
    dynamic_sampling: bool = False
    """Sample further prompts instead of groups that teach nothing (DAPO): see filter_on."""
    max_refills: int = 10
    """With dynamic_sampling: at most this times prompts_per_step are replaced for a step; then the run stops."""
    filter_groups: bool = False
    """Leave groups that teach nothing (see filter_on) out of the loss and its denominators, without sampling others in
    their place (ScaleRL)."""
    filter_on: str = "outcome"
    """Value that must differ within a group, with dynamic_sampling or filter_groups: outcome, the reward without
    the overlong penalty and a reward model's score; reward, all of it; or the name of a term or part of it."""
    filter_low: float | None = None
    """A group whose mean of filter_on is below this teaches nothing either."""
    filter_high: float | None = None
    """A group whose mean of filter_on is above this teaches nothing either (PRIME: 0.2 to 0.8)."""
    train_on_truncated_responses: bool = True
    """Off leaves responses that ran into max_response_tokens out of the loss (DAPO)."""
    truncated_responses_in_statistics: bool = True
    """Truncated responses excluded from the loss still count in their group's statistics (DAPO); off excludes them
    there, too, so that the advantages that are trained on are centred."""
    router_replay: str = "none"
    """Experts that the policy's tokens go to as it learns: none, those that its own routers choose; rollout, those that
    the engine chose as it sampled (R3, arXiv 2510.11370), by weights that the routers give and learn."""
    updates_per_step: int = 1
    """Optimizer steps per rollout; the prompts of a step are cut into this many mini-batches."""


@dataclass
class CriticConfig:
    """The value model of an advantage that needs one (gae)."""

    path: str | None = None
    """HuggingFace folder whose weights it begins with; by default the policy's."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Options that differ from those of the group `megatron`: parallel sizes, lr, ..."""
    ranks: int | None = None
    """Megatron ranks; by default as many as the policy's."""
    value_clip: float | None = 0.5
    """A new value counts at most this far from the old one (PPO's value clipping); none without."""
    warmup_steps: int = 0
    """First steps in which the critic alone learns and the policy stays; the schedule of the policy's learning rate
    is of the steps that follow."""


@dataclass
class TeacherConfig:
    """A model that the policy is distilled from, on what the policy itself samples."""

    path: str = MISSING
    """HuggingFace folder; its tokenizer must be the policy's."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Options that differ from those of the group `megatron`."""
    ranks: int | None = None
    """Megatron ranks; by default as many as the policy's."""
    data_sources: list[str] = field(default_factory=list)
    """The values of the column data_source that this teacher is for; empty is all."""

    def teaches(self, data_source: str) -> bool:
        """Whether responses to prompts of a data source are compared with this teacher."""
        return not self.data_sources or data_source in self.data_sources


@dataclass
class RewardModelConfig:
    """A frozen model that scores responses, as `megarl reward-model` trains it."""

    path: str | None = None
    """HuggingFace folder; without one there is no reward model."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Options that differ from those of the group `megatron`."""
    ranks: int | None = None
    """Megatron ranks; by default as many as the policy's."""
    weight: float = 1.0
    """Weight of its score beside the other rewards."""


@dataclass
class ImplicitRewardModelConfig:
    """The model that learns online to reward tokens, for an advantage that needs one (prime)."""

    path: str | None = None
    """HuggingFace folder it begins as; by default model.path."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Options that differ from those of the group `megatron`."""
    ranks: int | None = None
    """Megatron ranks; by default as many as the policy's."""
    beta: float = 0.05
    """Weight of the log-ratio between the model and what it began as, the reward of a token."""


@dataclass
class PreferenceConfig:
    """Training on pairs (`megarl dpo`, `megarl reward-model`) and against an earlier self (`megarl spin`)."""

    train_files: list[str] = field(default_factory=list)
    """Parquet files of pairs, or for `megarl spin` of conversations (as `sft.train_files`)."""
    eval_files: list[str] = field(default_factory=list)
    """Held-out pairs, of the same form."""
    prompt_column: str = "prompt"
    """Column of the prompts, each a chat list."""
    chosen_column: str = "chosen"
    """Column of the better replies: a text or a chat list."""
    rejected_column: str = "rejected"
    """Column of the worse replies."""
    messages_column: str = "messages"
    """Column of the conversations of `megarl spin`."""
    steps: int = 100
    """Optimizer steps."""
    pairs_per_step: int = 64
    """Pairs of one optimizer step."""
    eval_every: int = 25
    """Steps between measurements on eval_files."""
    beta: float = 0.1
    """Weight of the log-ratio to the reference (DPO, SPIN)."""
    label_smoothing: float = 0.0
    """Share of pairs whose preference is assumed to be wrong (conservative DPO)."""
    steps_per_generation: int = 10
    """Optimizer steps of `megarl spin` before the present policy becomes the opponent."""
