"""Compares arguments that Megatron-LM saved with a checkpoint (for `--use-checkpoint-args`) with a config.json.

Tensor shapes determine most of a model; a difference in the rest, such as the rotary base, would silently give another
model.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from converters.architectures import Architecture
from converters.errors import UserError
from converters.formats.torch_dist.checkpoint import TorchDistCheckpoint
from converters.formats.torch_dist.megatron_lm import ASKED_FOR, model_arguments

_ALWAYS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "normalization", "layernorm_epsilon"),
    *("norm_epsilon", "position_embedding_type", "rotary_base", "rotary_percent", "swiglu", "add_bias_linear"),
    *("add_qkv_bias", "qk_layernorm", "apply_layernorm_1p", "use_rope_scaling"),
    *("untie_embeddings_and_output_weights", "multi_latent_attention", "num_experts"),
)
_WITH_HEADS_IN_GROUPS = ("group_query_attention", "num_query_groups")
_WITH_EXPERTS = (
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_router_topk"),
    *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"),
)
_WITH_LATENT_ATTENTION = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type"),
    *("rotary_scaling_factor", "mscale", "mscale_all_dim"),
)


def check_saved_arguments(checkpoint: TorchDistCheckpoint, architecture: Architecture) -> None:
    """Raise UserError if the checkpoint has Megatron-LM arguments that contradict `architecture`.

    Missing arguments are taken from config.json.
    """
    saved = checkpoint.common.get("args") if checkpoint.common_place is not None else None
    if not isinstance(saved, argparse.Namespace):
        return
    for name, ours, theirs in different_arguments(architecture, vars(saved)):
        raise UserError(
            f"{checkpoint.folder} was written by a Megatron-LM with {name}={theirs}, and config.json gives {ours}: take"
            " the config.json of the model that was trained, or correct it"
        )


def different_arguments(architecture: Architecture, saved: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Arguments that would make Megatron-LM build another model, with the architecture's and the saved value."""
    ours, theirs = _as_computed({**ASKED_FOR, **model_arguments(architecture)}), _as_computed(saved)
    for name in _compared(ours):
        if name in ours and name in theirs and not _are_equal(ours[name], theirs[name]):
            yield name, ours[name], theirs[name]


def _as_computed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Drop arguments without effect: YaRN with factor 1, and the softmax's position with sigmoid scores."""
    computed = dict(arguments)
    if computed.get("rope_type") == "yarn" and computed.get("rotary_scaling_factor") == 1:
        computed["rope_type"] = "rope"
    if computed.get("moe_router_score_function") == "sigmoid":
        computed.pop("moe_router_pre_softmax", None)
    return computed


def _compared(ours: Mapping[str, Any]) -> tuple[str, ...]:
    names: tuple[str, ...] = _ALWAYS
    if ours.get("use_rope_scaling"):
        names += ("rope_scaling_factor",)
    if ours.get("multi_latent_attention"):
        names += _WITH_LATENT_ATTENTION
    elif ours["group_query_attention"]:
        names += _WITH_HEADS_IN_GROUPS
    if ours.get("num_experts"):
        names += _WITH_EXPERTS
    return names


def _are_equal(ours: Any, theirs: Any) -> bool:
    """Whether two values mean the same; values in another form, such as a pattern's text, count as equal."""
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return float(ours) == float(theirs)
    return type(ours) is not type(theirs) or ours == theirs
