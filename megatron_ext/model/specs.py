"""Chooses the modules that a model is built from: Transformer Engine's, or plain torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.post_training.modelopt.layers import Linear as DuplicatedLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from converters.architectures.extensions import Extensions
from converters.layouts.megatron import ModuleNames
from megatron_ext.attention.core_attention import core_attention, needs_preflight
from megatron_ext.attention.packed_attention import PackedAttention
from megatron_ext.model.extensions import check_transformer_engine_suffices, extend_layer
from megatron_ext.model.multi_token_prediction import PredictionLayer
from megatron_ext.model.norms import RMSNorm
from megatron_ext.options.device_fields import TRANSFORMER_ENGINE
from megatron_ext.routing.router import extend_router
from megatron_ext.versions import with_submodules

# Latent attention's down projections are replicated on every rank, as with Transformer Engine: with megatron-core's
# column-parallel ones, the gradient of the shared rotary key would not be summed over tensor-parallel ranks.
_ATTENTION_MODULES = {
    "core_attention": PackedAttention,
    "linear_q_down_proj": DuplicatedLinear,
    "linear_kv_down_proj": DuplicatedLinear,
    "q_layernorm": RMSNorm,
    "k_layernorm": RMSNorm,
    "kv_layernorm": RMSNorm,
}


def module_names(config: TransformerConfig) -> ModuleNames:
    """The naming scheme of a model's parameters."""
    return "te" if _has_transformer_engine(config) else "local"


def _has_transformer_engine(config: TransformerConfig) -> bool:
    return config.transformer_impl == TRANSFORMER_ENGINE


def block_spec(
    config: TransformerConfig,
    extensions: Extensions,
    *,
    pipeline_rank: int,
    chunk: int | None,
    shared_prefixes: bool,
) -> TransformerBlockSubmodules:
    """The layers of one model chunk; `chunk` is None without virtual pipeline stages.

    With `shared_prefixes` their attention also accepts `SharedSequences`.

    Raises UserError for extensions that Transformer Engine's modules do not support.
    """
    with_transformer_engine = _has_transformer_engine(config)
    if with_transformer_engine:
        check_transformer_engine_suffices(extensions)
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=with_transformer_engine,
        normalization=config.normalization,
        vp_stage=chunk,
        pp_rank=pipeline_rank,
    )
    layers = [extend_router(layer, extensions) for layer in spec.layer_specs]
    if with_transformer_engine:
        attended = _with_mergeable_attention(layers) if shared_prefixes else _with_working_attention(layers, config)
        return replace(spec, layer_specs=attended)
    layers = [extend_layer(_plain_layer(layer, config), extensions) for layer in layers]
    return replace(spec, layer_specs=layers, layer_norm=RMSNorm)


def multi_token_prediction_spec(
    config: TransformerConfig, block: TransformerBlockSubmodules, *, chunk: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The multi-token-prediction layers, each around a layer like the last of `block`.

    None if the model has no such layers, and on all chunks but the last.
    """
    with_transformer_engine = _has_transformer_engine(config)
    spec = get_gpt_mtp_block_spec(config, block, with_transformer_engine, vp_stage=chunk)
    if spec is None:
        return spec
    norms = {} if with_transformer_engine else {"enorm": RMSNorm, "hnorm": RMSNorm, "layer_norm": RMSNorm}
    layers = [
        replace(layer, module=PredictionLayer, submodules=_substitute(layer.submodules, norms))
        for layer in spec.layer_specs
    ]
    return replace(spec, layer_specs=layers)


def _with_mergeable_attention(layers: list[ModuleSpec]) -> list[ModuleSpec]:
    # Transformer Engine's attention does not return the log-sum-exps needed to merge the parts of a response's
    # attention.
    return [_with_core(layer, PackedAttention) for layer in layers]


def _with_working_attention(layers: list[ModuleSpec], config: TransformerConfig) -> list[ModuleSpec]:
    if not needs_preflight(config):
        return layers
    fused = {layer.submodules.self_attention.submodules.core_attention for layer in layers}
    working = {core: core_attention(core, config) for core in fused}
    return [_with_core(each, working[each.submodules.self_attention.submodules.core_attention]) for each in layers]


def _with_core(layer: ModuleSpec, core: type) -> ModuleSpec:
    attention = layer.submodules.self_attention
    attention = replace(attention, submodules=replace(attention.submodules, core_attention=core))
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))


def _plain_layer(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    attention = layer.submodules.self_attention
    plain_attention = replace(attention, submodules=_substitute(attention.submodules, _ATTENTION_MODULES))
    if config.multi_latent_attention and config.q_lora_rank is None:
        # This norm would have no input, and megatron-core 0.19 refuses it.
        plain_attention = with_submodules(plain_attention, q_layernorm=IdentityOp)
    norms = _substitute(layer.submodules, {"input_layernorm": RMSNorm, "pre_mlp_layernorm": RMSNorm})
    return replace(layer, submodules=replace(norms, self_attention=plain_attention))


def _substitute(submodules: Any, modules: Mapping[str, type]) -> Any:
    """Replace those of the submodules that `modules` names and that are used."""
    used = {name: module for name, module in modules.items() if getattr(submodules, name, IdentityOp) is not IdentityOp}
    return replace(submodules, **used)
