"""Describes a model for Megatron-LM and Megatron-Bridge: as arguments in `common.pt`, and as command-line flags.

Uses megatron-core's fields, the arguments of Megatron-LM core_v0.16, and those that Megatron-Bridge 0.3 still reads
under an older name.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converters.architectures import Architecture
from converters.architectures.extensions import Extensions
from converters.layouts.parallel_sizes import ParallelSizes

_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_moe_experts": ("num_experts",),
    "max_sequence_length": ("max_position_embeddings",),
    "rope_scaling": ("use_rope_scaling",),
    "layernorm_epsilon": ("layernorm_epsilon", "norm_epsilon"),
    "layernorm_zero_centered_gamma": ("layernorm_zero_centered_gamma", "apply_layernorm_1p"),
    "share_embeddings_and_output_weights": (),
}
"""Field of TransformerConfig or argument of GPTModel -> arguments, where they are called otherwise or twice."""
ASKED_FOR: Mapping[str, Any] = {
    "add_position_embedding": True,
    "apply_layernorm_1p": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": True,
    "config_logger_dir": "",
    "cp_comm_type": ["p2p"],
    "data_parallel_random_init": False,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "fp16_lm_cross_entropy": False,
    "fp8_param_gather": False,
    "heterogeneous_layers_config_path": None,
    "init_method_xavier_uniform": False,
    "is_hybrid_model": False,
    "layernorm_zero_centered_gamma": False,
    "moe_grouped_gemm": None,
    "moe_use_legacy_grouped_gemm": False,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "no_persist_layer_norm": False,
    "num_experts": None,
    "overlap_p2p_comm": False,
    "qk_l2_norm": False,
    "qk_layernorm": False,
    "rotary_interleaved": False,
    "squared_relu": False,
    "tokenizer_type": "HuggingFaceTokenizer",
    "transformer_impl": "transformer_engine",
    "use_rope_scaling": False,
}
"""Arguments that readers expect to be present; None means "not specified"."""

_VALUE_FLAGS: Mapping[str, str] = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "kv_channels": "--kv-channels",
    "max_position_embeddings": "--max-position-embeddings",
    "normalization": "--normalization",
    "layernorm_epsilon": "--norm-epsilon",
    "position_embedding_type": "--position-embedding-type",
    "rotary_base": "--rotary-base",
    "rotary_percent": "--rotary-percent",
    "hidden_dropout": "--hidden-dropout",
    "attention_dropout": "--attention-dropout",
    "num_experts": "--num-experts",
    "moe_ffn_hidden_size": "--moe-ffn-hidden-size",
    "moe_shared_expert_intermediate_size": "--moe-shared-expert-intermediate-size",
    "moe_layer_freq": "--moe-layer-freq",
    "moe_router_topk": "--moe-router-topk",
    "moe_router_dtype": "--moe-router-dtype",
    "moe_router_load_balancing_type": "--moe-router-load-balancing-type",
    "moe_router_score_function": "--moe-router-score-function",
    "moe_router_num_groups": "--moe-router-num-groups",
    "moe_router_group_topk": "--moe-router-group-topk",
    "moe_router_topk_scaling_factor": "--moe-router-topk-scaling-factor",
    "moe_router_bias_update_rate": "--moe-router-bias-update-rate",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type",
    "q_lora_rank": "--q-lora-rank",
    "kv_lora_rank": "--kv-lora-rank",
    "qk_head_dim": "--qk-head-dim",
    "qk_pos_emb_head_dim": "--qk-pos-emb-head-dim",
    "v_head_dim": "--v-head-dim",
    "rope_type": "--rope-type",
    "rotary_scaling_factor": "--rotary-scaling-factor",
    "mscale": "--mscale",
    "mscale_all_dim": "--mscale-all-dim",
    "mtp_num_layers": "--mtp-num-layers",
    "vocab_size": "--vocab-size",
    "padded_vocab_size": "--padded-vocab-size",
    "make_vocab_size_divisible_by": "--make-vocab-size-divisible-by",
    "tokenizer_type": "--tokenizer-type",
    "tokenizer_model": "--tokenizer-model",
}
"""Argument -> flag with a value."""
_SWITCHES: Mapping[str, tuple[bool, str]] = {
    "swiglu": (True, "--swiglu"),
    "add_bias_linear": (False, "--disable-bias-linear"),
    "add_qkv_bias": (True, "--add-qkv-bias"),
    "layernorm_zero_centered_gamma": (True, "--apply-layernorm-1p"),
    "untie_embeddings_and_output_weights": (True, "--untie-embeddings-and-output-weights"),
    "qk_layernorm": (True, "--qk-layernorm"),
    "use_rope_scaling": (True, "--use-rope-scaling"),
    "multi_latent_attention": (True, "--multi-latent-attention"),
    "moe_router_pre_softmax": (True, "--moe-router-pre-softmax"),
    "moe_router_enable_expert_bias": (True, "--moe-router-enable-expert-bias"),
    "bf16": (True, "--bf16"),
    "fp16": (True, "--fp16"),
}
"""Argument -> the value that its flag without a value stands for."""
_FIXED: Mapping[str, Any] = {
    "gated_linear_unit": True,
    "swiglu": True,
    "rope_scaling_factor": 8.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "softmax_scale": None,
    "window_size": None,
    "window_attn_skip_freq": None,
}
"""Argument -> the only value that Megatron-LM's command line can give the model."""


@dataclass(frozen=True)
class Vocabulary:
    """How the vocabulary is padded, and where the tokenizer is."""

    padded_size: int
    multiple: int
    """Megatron-LM's `--make-vocab-size-divisible-by`."""
    tokenizer: Path


def megatron_lm_arguments(
    architecture: Architecture, parallel: ParallelSizes, vocabulary: Vocabulary, dtype: torch.dtype
) -> dict[str, Any]:
    """The arguments of Megatron-LM that define the model, and those that readers expect."""
    return {
        **ASKED_FOR,
        **model_arguments(architecture),
        "padded_vocab_size": vocabulary.padded_size,
        "make_vocab_size_divisible_by": vocabulary.multiple,
        "tokenizer_model": str(vocabulary.tokenizer),
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "params_dtype": dtype,
        **{name: value for name, value in vars(parallel).items() if value is not None},
        "expert_tensor_parallel_size": parallel.expert_tensor_size,
        "decoder_first_pipeline_num_layers": parallel.num_layers_in_first_pipeline_stage,
        "decoder_last_pipeline_num_layers": parallel.num_layers_in_last_pipeline_stage,
    }


def model_arguments(architecture: Architecture) -> dict[str, Any]:
    """The arguments of Megatron-LM that define what the model computes."""
    fields = {**architecture.transformer_config, **architecture.gpt_model}
    groups = fields.get("num_query_groups")
    return {
        **{name: value for field, value in fields.items() if _is_plain(value) for name in _NAMES.get(field, (field,))},
        "rotary_base": _whole(fields["rotary_base"]),
        "swiglu": fields["gated_linear_unit"] and fields["activation_func"] is torch.nn.functional.silu,
        "group_query_attention": groups is not None and groups != fields["num_attention_heads"],
        "untie_embeddings_and_output_weights": not fields["share_embeddings_and_output_weights"],
        "seq_length": fields["max_sequence_length"],
    }


def megatron_lm_flags(arguments: Mapping[str, Any]) -> str:
    """The model's flags for Megatron-LM's command line, one per line; none needs quotes."""
    lines = []
    if arguments["group_query_attention"]:
        lines += ["--group-query-attention", f"--num-query-groups {arguments['num_query_groups']}"]
    for name, flag in _VALUE_FLAGS.items():
        if (value := arguments.get(name)) is not None:
            lines.append(f"{flag} {_pattern(value) if isinstance(value, list) else value}")
    lines += [flag for name, (stands_for, flag) in _SWITCHES.items() if arguments.get(name) is stands_for]
    return "".join(f"{line}\n" for line in lines)


def beyond_megatron_lm(architecture: Architecture) -> str | None:
    """Name a feature of the model that Megatron-LM's flags cannot express, so that it would compute another model.

    None if the flags express the whole model.
    """
    arguments = model_arguments(architecture)
    extensions, none = vars(architecture.extensions), vars(Extensions())
    beyond = [f"{name} = {value}" for name, value in extensions.items() if value != none[name]]
    beyond += [
        f"{name} = {arguments[name]}"
        for name, value in _FIXED.items()
        if name in arguments and arguments[name] != value
    ]
    if not isinstance(arguments["rotary_base"], int):
        beyond.append(f"rotary_base = {arguments['rotary_base']}")
    return ", ".join(beyond) or None


def _is_plain(value: Any) -> bool:
    """Whether reading it back runs no code, unlike a function."""
    return value is None or isinstance(value, bool | int | float | str | list | tuple)


def _whole(value: float) -> float:
    """Convert to an integer if it is one: `--rotary-base` accepts no other."""
    return int(value) if math.isfinite(value) and value == int(value) else value


def _pattern(values: list[int]) -> str:
    """A list in the form of `--moe-layer-freq`: ([0]*3+[1]*58)."""
    return f"({'+'.join(f'[{value}]*{count}' for value, count in _runs(values))})"


def _runs(values: list[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for end in range(1, len(values) + 1):
        if end == len(values) or values[end] != values[start]:
            yield values[start], end - start
            start = end
