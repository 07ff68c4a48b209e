"""Arguments of slime and what becomes of each here; all others are Megatron-LM's."""

from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Any] = {
    "actor_num_gpus_per_node": 8,
    "actor_num_nodes": 1,
    "advantage_estimator": "grpo",
    "clip_grad": 1.0,
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "gamma": 1.0,
    "kl_coef": 0.0,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "lambd": 1.0,
    "lr": 1e-6,
    "n_samples_per_prompt": 1,
    "num_critic_only_steps": 0,
    "rollout_num_gpus_per_engine": 1,
    "tis_clip": 2.0,
    "value_clip": 0.2,
}
"""Argument -> slime's default, where it counts for the recipe."""

SAME: Mapping[str, str] = {
    "entropy_coef": "algorithm.entropy_coefficient",
    "eval_interval": "loop.eval_every",
    "eval_temperature": "loop.eval_temperature",
    "hf_checkpoint": "model.path",
    "input_key": "data.prompt_column",
    "n_samples_per_eval_prompt": "loop.eval_samples",
    "n_samples_per_prompt": "loop.samples_per_prompt",
    "num_rollout": "loop.steps",
    "ref_update_interval": "algorithm.refresh_reference_every",
    "rollout_batch_size": "loop.prompts_per_step",
    "rollout_max_prompt_len": "data.max_prompt_tokens",
    "rollout_max_response_len": "rollout.max_response_tokens",
    "rollout_temperature": "rollout.temperature",
    "rollout_top_k": "rollout.top_k",
    "rollout_top_p": "rollout.top_p",
    "save": "output_dir",
    "save_interval": "checkpoint.every",
    "seed": "loop.seed",
    "wandb_group": "tracking.run_name",
    "wandb_project": "tracking.project",
}
"""Argument -> key of megarl that takes the same value."""

LISTS: Mapping[str, str] = {"rollout_stop_token_ids": "rollout.stop_token_ids"}
"""The same, for several values."""

SWITCHES: Mapping[str, tuple[str, Any]] = {
    "async_save": ("checkpoint.async_save", True),
    "rollout_shuffle": ("data.shuffle", True),
    "skip_eval_before_train": ("loop.eval_at_start", False),
    "use_rollout_logprobs": ("algorithm.ratio_to", "rollout"),
    "use_rollout_routing_replay": ("algorithm.router_replay", "rollout"),
    "use_unbiased_kl": ("algorithm.kl_unbiased", True),
}
"""Argument without a value -> key of megarl and its value."""

ADVANTAGES: Mapping[str, tuple[str, str]] = {
    "grpo": ("grpo", "clip"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "ppo": ("gae", "clip"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "clip"),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "clip"),
}
"""Value of --advantage-estimator -> advantage and policy loss."""

KL_ESTIMATORS: Mapping[str, str] = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}

REWARDS: Mapping[str, str] = {
    **dict.fromkeys(("math", "deepscaler", "dapo"), "math"),
    "gpqa": "multiple_choice",
}
"""Value of --rm-type -> reward."""

_PACKED = "micro-batches are always packed, without padding, by tokens"
_TURNS = "who waits for its turn on shared GPUs always has its memory on the host"
_MODEL = "weights come from model.path, also those of the reference"
_RUN = "a run goes on from the latest checkpoint in output_dir"

ALWAYS: Mapping[str, str] = {
    **dict.fromkeys(
        ("balance_data", "data_pad_size_multiplier", "micro_batch_size", "qkv_format", "use_dynamic_batch_size"),
        _PACKED,
    ),
    **dict.fromkeys(("offload", "offload_rollout", "offload_train"), _TURNS),
    **dict.fromkeys(("megatron_to_hf_mode", "model_name", "ref_ckpt_step", "ref_load", "padded_vocab_size"), _MODEL),
    **dict.fromkeys(("load", "no_save_optim", "start_rollout_id"), _RUN),
    **dict.fromkeys(("log_probs_chunk_size", "log_probs_max_tokens_per_gpu"), _PACKED),
    "apply_chat_template": "prompts are always chats",
    "num_gpus_per_node": "nodes are as the cluster has them",
    "num_epoch": "the length of a run is loop.steps",
    "over_sampling_batch_size": "with dynamic_sampling, prompts are drawn one by one as they are needed",
    "rollout_global_dataset": "prompts are drawn from all files together",
    "rollout_skip_special_tokens": "rewards see the response as the tokenizer decodes it",
    "train_backend": "the trainer is always Megatron-core",
    "update_weight_buffer_size": "refit.bucket_bytes is the size of a bucket",
    "use_fault_tolerance": "engines that die are restarted: cluster.max_engine_restarts",
    "use_tensorboard": "tracking.loggers has tensorboard by default",
    "enable_mtp_training": "layers for multi-token prediction train as model.mtp_training says: detached",
    "eval_max_prompt_len": "held-out prompts have the limits of all",
    "eval_max_response_len": "held-out responses have the limit of all",
    "eval_top_p": "several responses to a held-out prompt are sampled from all tokens, one is greedy",
    "eval_top_k": "several responses to a held-out prompt are sampled from all tokens, one is greedy",
}
"""Argument -> why nothing needs to be said of it here."""

_DATA = (
    "prompts are parquet files with the columns data_source, prompt and reward_model.ground_truth: convert the files"
)
_OWN = "it has slime's own form: rewards are path/to/file.py:name in reward.function, all else is chosen by name"

ABSENT: Mapping[str, str] = {
    **dict.fromkeys(
        ("eval_config", "eval_input_key", "eval_label_key", "label_key", "metadata_key", "tool_key"), _DATA
    ),
    "apply_chat_template_kwargs": "the chat template takes no arguments",
    "loss_type": "megarl sft fine-tunes on conversations, with keys of the group sft",
    "multimodal_keys": "models of images are not trained",
    "partial_rollout": "schedule.in_flight=recompute lets responses go on under new weights",
    "rm_type": f"rewards are {', '.join(sorted(set(REWARDS.values())))} and those of docs/add_a_reward.md",
    "rm_url": "a reward is a function, and one of your own may ask a server",
    "rollout_num_gpus": "engines have the trainer's GPUs, or rollout.replicas says how many there are",
    "use_opd": "teachers are given as teachers.NAME.path",
    "use_opsm": "algorithm.off_policy_mask leaves such responses out",
    "use_routing_replay": "only the experts of the rollout are replayed: algorithm.router_replay",
    "normalize_advantages": "gae and reinforce_plus_plus always whiten advantages, others never",
}
"""Argument without a counterpart -> what there is in its place."""

ABSENT_BEGINNINGS: Mapping[str, str] = {
    "custom_": _OWN,
    **dict.fromkeys(("rollout_function", "data_source_path", "eval_function", "buffer_filter"), _OWN),
    "opd_": "teachers are given as teachers.NAME.path",
    "sglang_router": "requests are sent by megarl's own router",
    "update_weight": "refit.* says how weights move",
}
"""How such arguments begin -> the same."""
