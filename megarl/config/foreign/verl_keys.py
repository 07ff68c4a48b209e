"""Keys of verl, and the keys and values that they are translated to."""

from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Any] = {
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.optim.clip_grad": 1.0,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.strategy": "fsdp",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_penalty": "kl",
    "algorithm.lam": 1.0,
    "algorithm.rollout_correction.loss_type": "ppo_clip",
    "algorithm.rollout_is_level": "token",
    "algorithm.rollout_is_mode": "truncate",
    "critic.cliprange_value": 0.5,
    "critic.optim.clip_grad": 1.0,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "lora.alpha": 16,
    "rollout.n_gpus_per_node": 8,
    "rollout.nnodes": 1,
    "trainer.experiment_name": "gsm8k",
    "trainer.logger": ["console", "wandb"],
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.project_name": "verl_examples",
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.total_epochs": 30,
}
"""Key -> verl's default, if the recipe depends on it."""

_OPTIMIZERS = ("actor_rollout_ref.actor.optim.", "critic.optim.")
_STRATEGY = "actor_rollout_ref.actor.strategy"
DEFAULTS_OF: Mapping[str, Mapping[str, Any]] = {
    "megatron": {_STRATEGY: "megatron"},
    "veomni": {_STRATEGY: "veomni", **{f"{each}lr_scheduler_type": "cosine" for each in _OPTIMIZERS}},
    "torchtitan": {_STRATEGY: "torchtitan", **{f"{each}lr_scheduler_type": "linear" for each in _OPTIMIZERS}},
    "automodel": {
        _STRATEGY: "automodel",
        **{f"{each}lr_scheduler_type": "cosine" for each in _OPTIMIZERS},
        **{f"{each}min_lr_ratio": 0.01 for each in _OPTIMIZERS},
        **{f"{each}init_lr_ratio": 0.1 for each in _OPTIMIZERS},
    },
}
"""Value of model_engine -> verl's defaults there, if they differ."""

ALIASES: Mapping[str, str] = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_model.": "reward_model.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward_model.overlong_buffer.": "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.num_workers": "reward.num_workers",
    "reward_manager.name": "reward_model.reward_manager",
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": "actor_rollout_ref.actor"
    ".ulysses_sequence_parallel_size",
    "actor_rollout_ref.model.lora.": "lora.",
    "actor_rollout_ref.actor.lora.": "lora.",
    "actor_rollout_ref.model.lora_rank": "lora.rank",
    "actor_rollout_ref.model.lora_alpha": "lora.alpha",
    "actor_rollout_ref.model.target_modules": "lora.target_modules",
    "actor_rollout_ref.model.lora_adapter_path": "lora.adapter_path",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.rollout.quantization.weight_dtype": "actor_rollout_ref.rollout.quantization",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    **{f"{each}decay_type": f"{each}lr_scheduler_type" for each in _OPTIMIZERS},
    **{f"{each}min_lr_factor": f"{each}min_lr_ratio" for each in _OPTIMIZERS},
    **{f"{each}lr_min": f"{each}min_lr" for each in _OPTIMIZERS},
    **{f"{each}lr_start": f"{each}lr_warmup_init" for each in _OPTIMIZERS},
}
"""Name of a key in one version of verl -> its name in another; names that end in a dot are prefixes."""

SAME: Mapping[str, str] = {
    "data.prompt_key": "data.prompt_column",
    "data.shuffle": "data.shuffle",
    "data.seed": "loop.seed",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coefficient",
    "actor_rollout_ref.actor.checkpoint.async_save": "checkpoint.async_save",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.top_k": "rollout.top_k",
    "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router": "model.freeze_moe_router",
    "algorithm.filter_groups.enable": "algorithm.dynamic_sampling",
    "reward.num_workers": "reward.workers",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep_last",
    "trainer.val_before_train": "loop.eval_at_start",
    "trainer.project_name": "tracking.project",
    "trainer.experiment_name": "tracking.run_name",
    "lora.rank": "lora.rank",
    "lora.alpha": "lora.alpha",
    "lora.merge": "lora.merge",
    "lora.adapter_path": "lora.path",
    "ray_kwargs.ray_init.address": "cluster.address",
}
"""Key of verl -> key of megarl that takes the same value."""

OPTIMIZER = (
    *("lr", "min_lr", "weight_decay", "clip_grad", "lr_warmup_init", "lr_decay_style", "lr_wsd_decay_style"),
    "weight_decay_incr_style",
)
"""Below `optim`: options with the same name in Megatron."""
COUNTED_IN_STEPS = ("lr_warmup_steps", "lr_decay_steps", "lr_wsd_decay_steps")
"""The same, counted in rollouts; Megatron counts optimizer steps."""
OPTIMIZER_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("lr_decay_steps", "lr_wsd_decay_steps")),
    **dict.fromkeys(("lr_decay_style", "weight_decay_incr_style"), "constant"),
    **dict.fromkeys(("min_lr", "lr_warmup_init"), 0.0),
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "lr_warmup_steps": 0,
    "lr_wsd_decay_style": "exponential",
}
"""Option of Megatron -> its value in verl's optimizer by default."""
PARALLEL = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    "use_distributed_optimizer",
)
"""Below `megatron`: options with the same name in Megatron."""
OVERRIDES = ("override_transformer_config.", "override_ddp_config.", "override_optimizer_config.")
"""Below these, every key is an option of Megatron."""

ADVANTAGES: Mapping[str, str] = {
    **{
        name: name
        for name in (
            "gae",
            "grpo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "remax",
            "opo",
            "gpg",
        )
    },
    "grpo_passk": "grpo_pass_k",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "gdpo": "gdpo",
    "optimal_token_baseline": "optimal_token_baseline",
}
POLICY_LOSSES: Mapping[str, str] = {
    "vanilla": "clip",
    "geo_mean": "gmpo",
    "gpg": "policy_gradient",
    **{name: name for name in ("gspo", "sapo", "clip_cov", "kl_cov", "cispo", "dppo_tv", "dppo_kl")},
}
BYPASS_LOSSES: Mapping[str, str] = {"ppo_clip": "clip", "reinforce": "policy_gradient"}
"""Value of loss_type with bypass_mode, which replaces loss_mode -> policy loss."""
KL_ESTIMATORS: Mapping[str, str] = {
    **dict.fromkeys(("kl", "k1"), "k1"),
    **dict.fromkeys(("mse", "k2"), "k2"),
    **dict.fromkeys(("low_var_kl", "k3"), "k3"),
    **dict.fromkeys(("kl+", "k1+"), "k1+"),
    **dict.fromkeys(("low_var_kl+", "k3+"), "k3+"),
    "abs": "abs",
    "abs+": "abs+",
}
AGGREGATIONS: Mapping[str, str] = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
CORRECTIONS: Mapping[str, str] = {"token": "token_importance", "sequence": "sequence_importance"}
LEVELS: Mapping[str, str] = {"token": "token", "sequence": "sequence", "geometric": "sequence_mean"}
"""Level of importance weights in verl 0.6.0 -> prefix of the kind of correction."""
MODES: Mapping[str, str] = {"truncate": "importance", "mask": "band"}
"""How verl 0.6.0 treats ratios outside the bounds -> suffix of the kind of correction."""
DECAYS: Mapping[str, str] = {name: name for name in ("constant", "cosine", "linear")}
DTYPES: Mapping[str, str] = {"bfloat16": "bf16", "float32": "fp32"}
LOGGERS = ("console", "wandb", "mlflow", "tensorboard")
FILTERS: Mapping[str, str] = {"acc": "outcome", "score": "reward", "seq_reward": "reward", "seq_final_reward": "reward"}

POLICY_LOSS_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "sapo": {
        "actor_rollout_ref.actor.tau_pos": "temperature_positive",
        "actor_rollout_ref.actor.tau_neg": "temperature_negative",
    },
    "clip_cov": {
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": "covariance_fraction",
        "actor_rollout_ref.actor.policy_loss.clip_cov_lb": "covariance_low",
        "actor_rollout_ref.actor.policy_loss.clip_cov_ub": "covariance_high",
    },
    "kl_cov": {
        "actor_rollout_ref.actor.policy_loss.kl_cov_ratio": "covariance_fraction",
        "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": "covariance_kl_coefficient",
    },
}
"""Policy loss -> key of verl -> option of the loss."""
CLIPPED = ("clip", "gspo", "gmpo", "cispo", "clip_cov", "dppo_tv", "dppo_kl")
"""Policy losses with a lower and an upper clip."""
OPEN_BELOW = ("clip", "gspo", "cispo", "clip_cov", "dppo_tv")
"""Policy losses that have no lower clip from 1 on, the maximum here, because a ratio is never below 0."""
CLIPPED_AGAIN: Mapping[str, str] = {"clip": "dual_clip", "dppo_tv": "ratio_cap", "dppo_kl": "ratio_cap"}
"""Policy loss -> the option that corresponds to `clip_ratio_c`."""
AGGREGATED: Mapping[str, str] = dict.fromkeys(("gspo", "sapo", "gmpo"), "seq_mean_token_mean")
"""Policy loss -> its aggregation, whatever `loss_agg_mode` says."""
NORMALIZED = ("grpo", "grpo_pass_k", "gdpo")
"""Whether an override chooses a file, as `algorithm=gspo` does in configs/algorithm/, and does not set a value."""

_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
FROM_MINUS_ONE = "math_dapo"
"""The reward that is 1 or -1 in verl, and 1 or 0 here."""
REWARDS: Mapping[str, tuple[str, ...]] = {
    "gsm8k": ("openai/gsm8k",),
    "math": (*_MATH, *(f"numina_{each}" for each in _NUMINA)),
    FROM_MINUS_ONE: ("math_dapo", "math", "math_dapo_reasoning", "aime*"),
}
"""Reward -> values of data_source for which verl uses it."""
