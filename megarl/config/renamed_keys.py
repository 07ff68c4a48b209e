"""Keys of other frameworks, and their names here."""

from collections.abc import Mapping

from megarl.config.foreign.verl_keys import SAME

VERL: Mapping[str, str] = {
    **{key: own for key, own in SAME.items() if key != own},
    "data.train_files": "data.train_files",
    "data.val_files": "data.eval_files",
    "data.train_batch_size": "loop.prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_response_tokens",
    "data.filter_overlong_prompts": "data.overlong_prompts=drop",
    "data.truncation": "data.overlong_prompts",
    "actor_rollout_ref.hybrid_engine": "cluster.pools (shared)",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "megatron.recompute_granularity=full",
    **{
        f"actor_rollout_ref.{of_verl}{name}": f"lora.{name}"
        for of_verl in ("model.lora.", "actor.lora.")
        for name in ("rank", "alpha", "target_modules")
    },
    "actor_rollout_ref.model.lora_rank": "lora.rank",
    "actor_rollout_ref.model.lora_alpha": "lora.alpha",
    "actor_rollout_ref.model.target_modules": "lora.target_modules",
    "actor_rollout_ref.model.lora_adapter_path": "lora.path",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "algorithm.updates_per_step",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "loop.max_tokens_per_micro_batch",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "loop.max_tokens_per_micro_batch",
    "actor_rollout_ref.actor.clip_ratio": (
        "algorithm.policy_loss_options.clip_low and algorithm.policy_loss_options.clip_high"
    ),
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.policy_loss_options.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.policy_loss_options.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.policy_loss_options.dual_clip",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.aggregation",
    "actor_rollout_ref.actor.loss_scale_factor": "algorithm.aggregation_options.length",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl_coefficient (above 0)",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coefficient",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_estimator",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "algorithm.policy_loss",
    "actor_rollout_ref.actor.lr": "megatron.lr",
    "actor_rollout_ref.actor.optim.lr": "megatron.lr",
    "actor_rollout_ref.actor.max_grad_norm": "megatron.clip_grad",
    "actor_rollout_ref.actor.optim.clip_grad": "megatron.clip_grad",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "megatron.lr_warmup_steps",
    "actor_rollout_ref.actor.optim.weight_decay": "megatron.weight_decay",
    "actor_rollout_ref.actor.router_replay.mode": "algorithm.router_replay (R3 is rollout)",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": "algorithm.router_replay=rollout",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.n": "loop.samples_per_prompt",
    "actor_rollout_ref.rollout.tensor_parallel_size": "rollout.engine_args.tensor_parallel_size",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.engine_args.tensor_parallel_size",
    "actor_rollout_ref.rollout.data_parallel_size": "rollout.replicas",
    "algorithm.adv_estimator": "algorithm.advantage",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage_options.normalize_by_std",
    "algorithm.lam": "algorithm.advantage_options.gae_lambda",
    "algorithm.use_kl_in_reward": "algorithm.kl_in=reward",
    "algorithm.kl_penalty": "algorithm.kl_estimator",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coefficient",
    "algorithm.kl_ctrl.type": "algorithm.kl_target (its presence adapts the coefficient)",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl_target",
    "algorithm.kl_ctrl.horizon": "algorithm.kl_horizon",
    "algorithm.filter_groups.max_num_gen_batches": "algorithm.max_refills",
    "algorithm.filter_groups.metric": "algorithm.filter_on",
    "data.filter_accuracy": "algorithm.filter_groups",
    "data.accuracy_lower_bound": "algorithm.filter_low",
    "data.accuracy_upper_bound": "algorithm.filter_high",
    "algorithm.rollout_correction.bypass_mode": "algorithm.ratio_to=rollout",
    "algorithm.rollout_correction.rollout_is": "algorithm.corrections",
    "algorithm.rollout_correction.rollout_is_threshold": "algorithm.corrections",
    "algorithm.rollout_correction.rollout_rs": "algorithm.corrections",
    "algorithm.rollout_correction.rollout_rs_threshold": "algorithm.corrections",
    "critic.model.path": "critic.path",
    "critic.optim.lr": "critic.megatron (its lr)",
    "critic.cliprange_value": "critic.value_clip",
    "trainer.critic_warmup": "critic.warmup_steps",
    "reward_model.overlong_buffer.len": "reward.overlong_buffer_tokens",
    "reward_model.overlong_buffer.penalty_factor": "reward.overlong_penalty",
    "reward_model.model.path": "reward_model.path",
    "custom_reward_function.path": "reward.function=path/to/file.py:name",
    "custom_reward_function.name": "reward.function=path/to/file.py:name",
    "reward.custom_reward_function.path": "reward.function=path/to/file.py:name",
    "reward.custom_reward_function.name": "reward.function=path/to/file.py:name",
    "trainer.total_training_steps": "loop.steps",
    "trainer.total_epochs": "loop.steps",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "loop.eval_every",
    "trainer.resume_mode": "checkpoint.resume",
    "trainer.default_local_dir": "output_dir",
    "trainer.logger": "tracking.loggers",
    "trainer.n_gpus_per_node": "cluster.trainer_ranks",
    "trainer.nnodes": "cluster.trainer_ranks",
}
"""Key of verl -> key of megarl, except those that are translated unchanged; some occur only in blog posts."""

VERL_PREFIXES: Mapping[str, str] = {
    "actor_rollout_ref.actor.megatron.": "megatron.",
    "actor_rollout_ref.actor.megatron.override_transformer_config.": "megatron.",
    "actor_rollout_ref.actor.optim.": "megatron.",
    "actor_rollout_ref.actor.": "megatron.",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.": "rollout.engine_args.",
    "actor_rollout_ref.rollout.engine_kwargs.sglang.": "rollout.engine_args.",
    "actor_rollout_ref.rollout.": "rollout.",
}
"""Prefix of verl keys -> prefix under which the rest may be a key of megarl, or an option of Megatron or the engine."""

VERL_ABSENT: Mapping[str, str] = {
    "actor_rollout_ref.model.backend": "the trainer is always Megatron-core, so leave it out",
    "actor_rollout_ref.actor.strategy": "the trainer is always Megatron-core, so leave it out",
    "actor_rollout_ref.actor.use_dynamic_bsz": "micro-batches are always packed by tokens, so leave it out",
    "actor_rollout_ref.actor.ppo_epochs": "every rollout is trained on once, so leave it out",
    "actor_rollout_ref.model.use_remove_padding": "batches are never padded, so leave it out",
    "actor_rollout_ref.rollout.enable_vision": "megarl trains on text alone, so leave it out",
    "trainer.async_weight_update": "new weights reach the engines before the next rollout, so leave it out",
    "reward_model.style": "a reward is a function, given as reward.function",
}
"""Key or prefix of verl keys without a counterpart -> what to do."""

MEGATRON_LM_FLAGS: Mapping[str, str] = {
    "bf16": "model.dtype=bf16",
    "fp32": "model.dtype=fp32",
    "global_batch_size": "loop.prompts_per_step",
    "micro_batch_size": "loop.max_tokens_per_micro_batch",
    "seq_length": "data.max_prompt_tokens and rollout.max_response_tokens",
    "train_iters": "loop.steps",
    "train_samples": "loop.steps",
    "lr_warmup_iters": "megatron.lr_warmup_steps",
    "lr_decay_iters": "megatron.lr_decay_steps",
    "seed": "loop.seed",
    "load": "model.path",
    "save": "output_dir",
    "save_interval": "checkpoint.every",
    "eval_interval": "loop.eval_every",
    "data_path": "data.train_files",
    "tensorboard_dir": "tracking.loggers",
}
"""Argument of Megatron-LM's training script that is not a field of megatron-core -> key of megarl."""

ELSEWHERE: Mapping[str, str] = {
    "cp": "megatron.context_parallel_size",
    "ep": "megatron.expert_model_parallel_size",
    "kl_coef": "algorithm.kl_coefficient",
    "learning_rate": "megatron.lr",
    "max_completion_length": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_steps": "loop.steps",
    "n": "loop.samples_per_prompt",
    "num_generations": "loop.samples_per_prompt",
    "num_generations_per_prompt": "loop.samples_per_prompt",
    "num_prompts_per_step": "loop.prompts_per_step",
    "pp": "megatron.pipeline_model_parallel_size",
    "tp": "megatron.tensor_model_parallel_size",
    "train_batch_size": "loop.prompts_per_step",
}
"""Last part of a key, or a flag, in TRL, NeMo RL or common use -> key of megarl."""

OWNED: Mapping[str, str] = {
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
}
"""Option of Megatron -> the key of megarl that determines it."""

MEGATRON_LM_ABSENT: Mapping[str, str] = {
    "torch_fsdp2_no_reshard_after_forward": "layers give the weights that they gathered back after their forward pass"
    " with megatron.use_torch_fsdp2: leave it out",
    "use_checkpoint_args": "the arguments that Megatron-LM saved with model.megatron_checkpoint are compared with"
    " config.json in any case: leave it out",
}
"""Argument of Megatron-LM's training script without a counterpart -> why, and what to do."""
