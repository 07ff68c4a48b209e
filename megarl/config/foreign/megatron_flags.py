"""Arguments of Megatron-LM's training script that are not fields of megatron-core, and their translation."""

from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, str] = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "ddp_average_in_collective": "average_in_collective",
    "ddp_bucket_size": "bucket_size",
    "ddp_pad_buckets_for_high_nccl_busbw": "pad_buckets_for_high_nccl_busbw",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "fp8_format": "fp8",
    "lr_decay_iters": "lr_decay_steps",
    "lr_warmup_iters": "lr_warmup_steps",
    "lr_wsd_decay_iters": "lr_wsd_decay_steps",
    "te_rng_tracker": "use_te_rng_tracker",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "use_nccl_ub": "nccl_ub",
}
"""Argument -> the field of megatron-core that it sets."""

SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "grad_reduce_in_bf16": {"grad_reduce_in_fp32": False},
    "no_bias_gelu_fusion": {"bias_activation_fusion": False},
    "no_bias_swiglu_fusion": {"bias_activation_fusion": False},
    "no_check_for_nan_in_loss_and_grad": {"check_for_nan_in_grad": False},
    "no_overlap_p2p_communication": {"overlap_p2p_comm": False},
    "no_rope_fusion": {"apply_rope_fusion": False},
    "recompute_activations": {"recompute_granularity": "selective"},
}
"""Argument without a value -> the fields of megatron-core that it sets."""

SAMPLES: Mapping[str, str] = {
    name.replace("iters", "samples"): steps for name, steps in RENAMED.items() if name.endswith("_iters")
}
"""Argument in samples -> the field of megatron-core in optimizer steps."""

KEYS: Mapping[str, tuple[str, str]] = {
    "bf16": ("model.dtype", "bf16"),
    "fp32": ("model.dtype", "fp32"),
    "freeze_moe_router": ("model.freeze_moe_router", "true"),
}
"""Argument without a value -> key of megarl and its value."""

MODEL: Mapping[str, str] = {
    **{
        name: name
        for name in (
            *("add_qkv_bias", "attention_dropout", "attention_output_gate", "ffn_hidden_size", "hidden_dropout"),
            *("hidden_size", "kv_channels", "kv_lora_rank", "moe_ffn_hidden_size", "moe_layer_freq"),
            *("moe_router_enable_expert_bias", "moe_router_group_topk", "moe_router_num_groups"),
            *("moe_router_pre_softmax", "moe_router_score_function", "moe_router_topk"),
            *("moe_router_topk_scaling_factor", "moe_shared_expert_gate", "moe_shared_expert_intermediate_size"),
            *("mscale", "mscale_all_dim", "multi_latent_attention", "normalization", "num_attention_heads"),
            *("num_layers", "num_query_groups", "position_embedding_type", "q_lora_rank", "qk_head_dim"),
            *("qk_layernorm", "qk_pos_emb_head_dim", "rope_scaling_factor", "rotary_base", "rotary_interleaved"),
            *("rotary_percent", "rotary_scaling_factor", "v_head_dim", "vocab_size", "window_size"),
        )
    },
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "disable_bias_linear": "add_bias_linear",
    "norm_epsilon": "layernorm_epsilon",
    "layernorm_epsilon": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
    "swiglu": "gated_linear_unit",
    "untie_embeddings_and_output_weights": "share_embeddings_and_output_weights",
    "use_rope_scaling": "rope_scaling",
}
"""Argument -> what it says about the model, as a name in `Architecture.transformer_config` or `gpt_model`."""

NEGATIVE = frozenset(("disable_bias_linear", "untie_embeddings_and_output_weights"))
"""Arguments whose presence means no."""

_GELU = "no architecture that is converted has this activation function"
REFUSED: Mapping[str, str] = {
    "fp16": "training is in bf16 or fp32: leave it out and set model.dtype",
    "openai_gelu": _GELU,
    "quick_geglu": _GELU,
    "squared_relu": _GELU,
    "lr_warmup_fraction": "warm-up counts optimizer steps here: give --lr-warmup-iters in its place",
    "rotary_seq_len_interpolation_factor": "positions are scaled as config.json says: leave it out",
    "spec": "such layers are of a model that is not converted: docs/add_an_architecture.md adds one",
    "torch_fsdp2_no_reshard_after_forward": "layers give the weights that they gathered back after their forward pass:"
    " leave it out",
}
"""Argument that would mean another model or another optimizer -> why, and what to do."""

_RUN = "the recipe says the batches, the length and the checkpoints of a run"
_DATA = "data and tokenizer are given as data.* and model.path"
_LOGGING = "what is logged follows from tracking.*"
_LAUNCH = "ranks are started and found by megarl"
_ALWAYS = "it is so here in any case"
_START = "weights come from model.path"
_IMPLIED = "config.json says it"

_RL = "the recipe's algorithm, rollout and loop say it"

LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("async_save", "auto_detect_ckpt_format", "decrease_batch_size_if_needed", "eval_global_batch_size"),
            *("eval_interval", "eval_iters", "eval_micro_batch_size", "exit_duration_in_mins", "exit_interval"),
            *("exit_on_missing_checkpoint", "exit_signal_handler", "finetune", "full_validation"),
            *("global_batch_size", "iterations_to_skip", "load", "load_optim", "load_rng", "manual_gc"),
            *("manual_gc_eval", "manual_gc_interval", "micro_batch_size", "override_opt_param_scheduler"),
            *("pretrained_checkpoint", "rampup_batch_size", "save", "save_interval", "save_optim", "save_rng"),
            *("save_retain_interval", "seed", "skip_train", "step_batch_size_schedule", "train_iters"),
            *("train_samples", "train_sync_interval", "use_checkpoint_opt_param_scheduler"),
            *("use_dist_ckpt", "use_persistent_ckpt_worker", "use_tokenizer_model_from_checkpoint_args"),
        ),
        _RUN,
    ),
    "use_checkpoint_args": "what was saved with model.megatron_checkpoint is compared with config.json in any case",
    **dict.fromkeys(
        (
            *("create_attention_mask_in_dataloader", "data_parallel_random_init", "data_sharding"),
            *("decoder_seq_length", "encoder_seq_length", "eod_mask_loss", "legacy_tokenizer"),
            *("make_vocab_size_divisible_by", "mask_prob", "max_position_embeddings", "merge_file"),
            *("mmap_bin_files", "mock_data", "num_dataset_builder_threads", "num_workers", "padded_vocab_size"),
            *("per_split_data_args_path", "reset_attention_mask", "reset_position_ids", "seq_length"),
            *("short_seq_prob", "split", "test_data_path", "tiktoken_pattern", "train_data_path"),
            *("trust_remote_code", "valid_data_path", "variable_seq_lengths", "vocab_extra_ids", "vocab_file"),
        ),
        _DATA,
    ),
    **dict.fromkeys(
        (
            *("barrier_with_L1_time", "barrier_with_level_1_timing", "check_weight_hash_across_dp_replicas_interval"),
            *("memory_snapshot_path", "moe_per_layer_logging", "nvtx_ranges", "one_logger"),
            *("record_memory_history", "result_rejected_tracker_filename", "save_params_dir"),
            *("timing_log_level", "timing_log_option", "use_pytorch_profiler"),
        ),
        _LOGGING,
    ),
    **dict.fromkeys(
        (
            *("create_all_gather_group", "disable_gloo_process_groups", "error_injection_rate"),
            *("high_priority_stream_groups", "lazy_mpu_init", "local_rank", "log_dir", "master_addr", "master_port"),
            *("max_restarts", "monitor_interval", "nccl_communicator_config_path", "nnodes", "node_rank"),
            *("nproc_per_node", "redirects", "rerun_mode", "role", "sharp_enabled_group", "standalone", "tee"),
            *("use_gloo_process_groups", "use_ring_exchange_p2p", "use_sharp", "use_tp_pp_dp_mapping"),
        ),
        _LAUNCH,
    ),
    **dict.fromkeys(
        (
            *("attention_softmax_in_fp32", "check_for_nan_in_loss", "delay_grad_reduce", "enable_experimental"),
            *("position_embedding", "sequence_parallel", "use_flash_attn", "use_mcore_models"),
            *("use_rotary_position_embeddings", "use_te", "yaml_cfg"),
        ),
        _ALWAYS,
    ),
    **dict.fromkeys(
        (
            *("embedding_init_method_std", "init_method_std", "init_method_xavier_uniform", "initialization"),
            *("perform_initialization", "use_cpu_initialization"),
        ),
        _START,
    ),
    **dict.fromkeys(("group_query_attention", "mtp_num_layers", "no_rope_freq"), _IMPLIED),
}
"""Argument (without `no_`) that is accepted and has no effect here -> why."""

LEFT_OUT_BEGINNINGS: Mapping[str, str] = {
    **dict.fromkeys(("ckpt_", "dist_ckpt_", "non_persistent_", "replication"), _RUN),
    **dict.fromkeys(("data_", "dataloader_", "fim_", "object_storage_", "sft", "tokenizer_"), _DATA),
    **dict.fromkeys(
        (
            *("adlr_", "app_tag_", "enable_one_logger", "log_", "logging_", "one_logger_", "otel_", "profile"),
            *("pytorch_profiler_", "tensorboard_", "wandb_"),
        ),
        _LOGGING,
    ),
    **dict.fromkeys(("calc_ft_", "distributed_", "enable_ft_", "enable_gloo_", "ft_", "inprocess_", "rdzv_"), _LAUNCH),
    **dict.fromkeys(("grpo_", "inference_", "langrl_", "perform_rl_", "refit_", "rl_"), _RL),
}
"""Prefix of such arguments -> why they have no effect here."""


def left_out(name: str) -> str:
    """Why an argument of the training script has no effect here; empty for all others."""
    positive = name.removeprefix("no_")
    beginning = next((why for start, why in LEFT_OUT_BEGINNINGS.items() if positive.startswith(start)), "")
    return LEFT_OUT.get(name) or LEFT_OUT.get(positive) or beginning
