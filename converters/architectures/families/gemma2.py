"""Gemma-2 (arXiv 2408.00118): alternating sliding and full attention, soft-capped logits, pre- and post-norms."""

from typing import Any

from converters.architectures.blocks import dense_mlp, embedding_and_output, grouped_query_attention
from converters.architectures.common import (
    decoder_dimensions,
    gpt_model,
    grouped_queries,
    rms_norm_decoder,
    tied_copies,
)
from converters.architectures.extensions import Extensions
from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.rotary import rotary_embedding
from converters.architectures.weight_map import Architecture, Kind, Parameter

MODEL_TYPES = ("gemma2",)

_MISSING_MEANS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_POST_NORMS = {
    "self_attention.linear_proj.post_layernorm": "post_attention_layernorm",
    "mlp.linear_fc2.post_layernorm": "post_feedforward_layernorm",
}


def read(config: HuggingFaceConfig) -> Architecture:
    """The Megatron model of a Gemma-2 config.json."""
    hf_config, config = config.fields, HuggingFaceConfig({**_MISSING_MEANS, **config.fields})
    config.require("attention_bias", (False,), False)
    config.require("use_bidirectional_attention", (False,), False)
    layers = range(config["num_hidden_layers"])
    return Architecture(
        model_type=config["model_type"],
        hf_config=hf_config,
        transformer_config={
            # The family has its own field for the activation, and ignores the usual one.
            **rms_norm_decoder(HuggingFaceConfig({**config.fields, "hidden_act": config["hidden_activation"]})),
            **grouped_queries(config, config.head_dim),
            "layernorm_zero_centered_gamma": True,
            "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
            **_sliding_window(config),
        },
        gpt_model=gpt_model(config, rotary_embedding(config)),
        multi_latent_attention=False,
        num_experts=0,
        dimensions=decoder_dimensions(config, config.head_dim),
        weight_map=(
            *embedding_and_output(tied=config.tied),
            *grouped_query_attention(layers),
            *dense_mlp(layers, norm="pre_feedforward_layernorm"),
            *(_post_norm(megatron, hf, layers) for megatron, hf in _POST_NORMS.items()),
        ),
        hf_copies=tied_copies(config),
        extensions=Extensions(
            embedding_scale=config["hidden_size"] ** 0.5,
            attention_softcap=config.get("attn_logit_softcapping", None),
            output_softcap=config.get("final_logit_softcapping", None),
            post_norms=True,
        ),
    )


def _sliding_window(config: HuggingFaceConfig) -> dict[str, Any]:
    """TransformerConfig fields; Megatron's window excludes the token itself, HuggingFace's includes it."""
    count = config["num_hidden_layers"]
    types = config.get("layer_types", ["full_attention" if i % 2 else "sliding_attention" for i in range(count)])
    if len(types) != count:
        raise config.error(f"has {len(types)} layer_types for {count} layers")
    if unknown := sorted(set(types) - {"sliding_attention", "full_attention"}):
        raise config.error(f"has the layer type {unknown[0]!r}, which is not supported")
    return {
        "window_size": (config["sliding_window"] - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in types],
    }


def _post_norm(megatron: str, hf: str, layers: range) -> Parameter:
    return Parameter(
        f"decoder.layers.{{layer}}.{megatron}.weight",
        ((f"model.layers.{{layer}}.{hf}.weight", ("hidden",)),),
        Kind.REPLICATED,
        layers=frozenset(layers),
    )
