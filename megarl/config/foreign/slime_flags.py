"""Arguments of slime, of this and earlier versions, and their translation; all others are Megatron-LM's."""

from collections.abc import Mapping
from typing import Any

from megarl.config.foreign.megatron_flags import SAMPLES

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
    "lr_decay_style": "linear",
    "n_samples_per_eval_prompt": 1,
    "n_samples_per_prompt": 1,
    "num_critic_only_steps": 0,
    "rollout_num_gpus_per_engine": 1,
    "rollout_seed": 42,
    "rollout_temperature": 1.0,
    "tis_clip": 2.0,
    "value_clip": 0.2,
    "weight_decay": 0.01,
}
"""Argument -> slime's default, if the recipe depends on it."""

OPTIMIZER = ("lr", "lr_decay_style", "weight_decay")
"""Options of Megatron among them; slime keeps the default of Megatron-LM's training script or sets its own."""

SAME: Mapping[str, str] = {
    "entropy_coef": "algorithm.entropy_coefficient",
    "eval_interval": "loop.eval_every",
    "hf_checkpoint": "model.path",
    "input_key": "data.prompt_column",
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
    "rollout_seed": "loop.seed",
    "save_interval": "checkpoint.every",
    "wandb_group": "tracking.run_name",
    "wandb_project": "tracking.project",
}
"""Argument -> key of megarl that takes the same value."""

CRITIC: Mapping[str, str] = {
    "critic_lr": "critic.megatron.lr",
    "critic_lr_warmup_iters": "critic.megatron.lr_warmup_steps",
    "num_critic_only_steps": "critic.warmup_steps",
    "value_clip": "critic.value_clip",
}
"""The same, if the advantage has a critic."""
CRITIC_RANKS = ("critic_num_nodes", "critic_num_gpus_per_node")
"""Arguments whose product is the number of the critic's ranks."""

LISTS: Mapping[str, str] = {"rollout_stop_token_ids": "rollout.stop_token_ids"}
"""The same, for several values."""

SWITCHES: Mapping[str, tuple[str, Any]] = {
    "async_save": ("checkpoint.async_save", True),
    "rollout_shuffle": ("data.shuffle", True),
    "skip_eval_before_train": ("loop.eval_at_start", False),
    "use_rollout_logprobs": ("algorithm.ratio_to", "rollout"),
    "use_rollout_routing_replay": ("algorithm.router_replay", "rollout"),
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

WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Advantages among them that are always whitened here, as with --normalize-advantages in slime."""

_FOR_A_KL = "for a KL in the loss set algorithm.kl_coefficient"
OTHER_KL_IN_REWARD: Mapping[str, str] = {
    "grpo": f"slime's own grpo, gspo and cispo make nothing of this KL, nor does the recipe; {_FOR_A_KL}",
    "reinforce_plus_plus_baseline": (
        "there each token's advantage bears the KL of that token, here the group would compare that of whole responses;"
        f" the recipe has none; {_FOR_A_KL}"
    ),
}
"""Advantage -> why --kl-coef is not translated to a KL in the reward."""

KL_ESTIMATORS: Mapping[str, str] = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}

REWARDS: Mapping[str, str] = {
    **dict.fromkeys(("math", "deepscaler"), "math"),
    "dapo": "math_dapo",
    "gpqa": "multiple_choice",
}
"""Value of --rm-type -> reward."""
ANSWER_AFTER: Mapping[str, str] = {"deepscaler": "</think>"}
"""Value of --rm-type -> the text that ends the thinking, without which there is no answer."""

EVAL_LIMITS: Mapping[str, tuple[str, str]] = {
    "eval_max_prompt_len": ("rollout_max_prompt_len", "held-out prompts have the limit of all"),
    "eval_max_response_len": ("rollout_max_response_len", "held-out responses have the limit of all"),
}
"""Evaluation limit -> the rollout's limit, and the one that applies here."""

ALL_TOKENS: Mapping[str, Any] = {"top_p": 1, "top_k": -1}
"""Suffix of a sampling argument -> its value that leaves no token out, as in evaluations here."""

_PACKED = "micro-batches are always packed, without padding, by tokens"
_TURNS = "who waits for its turn on shared GPUs always has its memory on the host"
_MODEL = "weights come from model.path, also those of the reference"
_RUN = "a run goes on from the latest checkpoint in output_dir"

_LOGGED = "it is logged, or checked, in any case"
_NAMES = "files and names of a run follow from output_dir and tracking.*"
_HEALTH = "cluster.silence_timeout_s says how long an engine may give no sign of life"
_ROUTER = "requests are sent by megarl's own router"

ALWAYS: Mapping[str, str] = {
    **dict.fromkeys(("check_weight_update_equal", "get_mismatch_metrics", "use_rollout_entropy"), _LOGGED),
    **dict.fromkeys(("critic_save", "wandb_random_suffix", "tb_experiment_name", "tb_project_name"), _NAMES),
    **dict.fromkeys(
        ("rollout_health_check_first_wait", "rollout_health_check_interval", "rollout_health_check_timeout"), _HEALTH
    ),
    **dict.fromkeys(("http_proxy", "use_distributed_post"), _ROUTER),
    **dict.fromkeys(SAMPLES, "slime does not read it: its schedules count --lr-warmup-iters and their kin"),
    "balance_by_flops": "sequences are always dealt evenly",
    "loss_mask_type": "only what the policy sampled is trained on",
    "recompute_loss_function": "log-probs are always computed a part of the vocabulary at a time",
    "release_train": _TURNS,
    "rollout_data_transport": "rollouts come to the trainer's ranks by themselves",
    "seed": "every random stream follows from loop.seed, which is --rollout-seed",
    "tis_clip_low": "it is a bound of --use-tis",
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
    "over_sampling_batch_size": "with dynamic_sampling, prompts are drawn one by one as they are needed",
    "rollout_global_dataset": "prompts are drawn from all files together",
    "rollout_skip_special_tokens": "rewards see the response as the tokenizer decodes it",
    "train_backend": "the trainer is always Megatron-core",
    "update_weight_buffer_size": "refit.bucket_bytes is the size of a bucket",
    "use_fault_tolerance": "engines that die are restarted: cluster.max_engine_restarts",
    "use_tensorboard": "tracking.loggers has tensorboard by default",
    "enable_mtp_training": "layers for multi-token prediction train as model.mtp_training says: detached",
}
"""Argument -> why it needs no note here."""

_DATA = (
    "prompts are parquet files with the columns data_source, prompt and reward_model.ground_truth: convert the files"
)
_OWN = "it has slime's own form: rewards are path/to/file.py:name in reward.function, all else is chosen by name"

_SAMPLED = "a run samples what it trains on, and trains on what it samples"
_NO_TEXTS = "responses are not written, only their metrics: a reward function of your own may write them"
_ALL_WEIGHTS = "all weights are trained, but for model.freeze_moe_router, or those of an adapter: lora.rank"
_SCORE = "a reward function returns a number, or a mapping whose score is the reward"
_STATES = "the optimizer keeps its states for the whole run"
_CONTEXT = "responses have rollout.max_response_tokens after any prompt, and an engine the limit of its own arguments"
_FILES = "prompts come from files, and a step has as many as loop.prompts_per_step"

ABSENT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("eval_config", "eval_input_key", "eval_label_key", "eval_tool_key", "label_key", "metadata_key"),
            "tool_key",
        ),
        _DATA,
    ),
    **dict.fromkeys(("debug_rollout_only", "debug_train_only"), _SAMPLED),
    **dict.fromkeys(
        ("load_debug_rollout_data", "load_debug_rollout_data_subsample", "load_forge_rollout_data"), _SAMPLED
    ),
    **dict.fromkeys(("dump_details", "save_debug_rollout_data", "save_debug_train_data"), _NO_TEXTS),
    **dict.fromkeys(("freeze_indexer", "freeze_params_name_list", "only_train_params_name_list"), _ALL_WEIGHTS),
    **dict.fromkeys(("eval_reward_key", "reward_key"), _SCORE),
    **dict.fromkeys(("reset_optimizer_states", "use_stateless_adam"), _STATES),
    **dict.fromkeys(("eval_max_context_len", "rollout_max_context_len"), _CONTEXT),
    **dict.fromkeys(
        ("fetch_trajectory_retry_times", "min_batch_collection_ratio", "rollout_buffer_url", "rollout_task_type"),
        _FILES,
    ),
    **dict.fromkeys(
        (
            *("rollout_all_samples_process_path", "rollout_data_postprocess_path", "rollout_sample_filter_path"),
            "rollout_sample_hook_path",
        ),
        _OWN,
    ),
    "allgather_cp": "context-parallel ranks pass keys and values on: those of packed sequences cannot be gathered",
    "critic_load": "the critic begins with critic.path, a HuggingFace folder, or with the policy's weights",
    "critic_train_only": "critic.warmup_steps are steps in which the critic alone learns",
    "compute_advantages_and_returns": "algorithm.advantage says what is computed",
    "eval_min_new_tokens": "a response may end with its first token",
    "group_rm": "a reward function scores one response",
    "keep_old_actor": "algorithm.ratio_to says which policy ratios compare with",
    "mask_offpolicy_in_partial_rollout": "algorithm.corrections has masks of tokens and responses",
    "megatron_config_path": "options of the critic are given as critic.megatron",
    "qwen_gdn_backend": "layers are computed by megatron-core",
    "rewards_normalization": "the advantage says how rewards are normalised: algorithm.advantage has others",
    "rollout_external_engine_addrs": "engines are started by megarl",
    "rollout_stop": "responses end at tokens: rollout.stop_token_ids",
    "save_hf": "the last step is written as a HuggingFace folder, and megarl export makes one of a checkpoint",
    "train_env_vars": "cluster.environment has the variables of all ranks and engines",
    "apply_chat_template_kwargs": "the chat template takes no arguments",
    "loss_type": "megarl sft fine-tunes on conversations, with keys of the group sft",
    "multimodal_keys": "models of images are not trained",
    "partial_rollout": "schedule.in_flight=recompute lets responses go on under new weights",
    "rm_type": f"rewards are {', '.join(sorted(set(REWARDS.values())))} and those of docs/add_a_reward.md",
    "rm_url": "a reward is a function, and one of your own may ask a server",
    "rollout_num_gpus": "engines have the trainer's GPUs, or rollout.replicas says how many there are",
    "use_opd": "teachers are given as teachers.NAME.path",
    **dict.fromkeys(("opsm_delta", "use_opsm"), "algorithm.off_policy_mask leaves such responses out"),
    "use_routing_replay": "only the experts of the rollout are replayed: algorithm.router_replay",
    "normalize_advantages": f"only {', '.join(WHITENED)} whiten advantages here, and always do",
}
"""Argument without a counterpart -> what there is instead."""

NEUTRAL: Mapping[str, str] = {"update_weights_interval": "1"}
"""Argument without a counterpart -> its value that asks for nothing."""

ABSENT_WITH: Mapping[str, tuple[str, ...]] = {
    "sglang_dp_size": ("sglang_enable_dp_",),
    "sglang_speculative_algorithm": ("sglang_speculative_",),
}
"""Argument of the engine -> how others begin that are left out with it."""

ABSENT_BEGINNINGS: Mapping[str, str] = {
    "ci_": "it is for slime's own tests",
    "custom_": _OWN,
    "megatron_deepgemm_": "the trainer computes in model.dtype",
    "memory_": "tracking.profile=STEP writes a timeline of all processes",
    **dict.fromkeys(("rollout_function", "data_source_path", "eval_function", "buffer_filter"), _OWN),
    "opd_": "teachers are given as teachers.NAME.path",
    "sglang_router": "requests are sent by megarl's own router",
    "update_weights_interval": "engines get the weights of every step: schedule.max_staleness lets them sample ahead",
    "sglang_server_concurrency": "an engine takes the requests that it has room for: max_running_requests limits them",
    "update_weight": "refit.* says how weights move",
}
"""How such arguments begin -> the same."""

NAMES = (*DEFAULTS, *EVAL_LIMITS, *SAME, *CRITIC, *LISTS, *SWITCHES, *ALWAYS, *ABSENT, "use_tis", "use_unbiased_kl")
"""Names to look for the nearest in, where an argument is unknown."""
