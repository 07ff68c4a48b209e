"""GLM-4.5 and 4.6 (arXiv 2508.06471): DeepSeek-V3's router, shared experts and multi-token prediction around
grouped-query attention, of which half of each head is rotated.
"""

from collections.abc import Collection

from converters.architectures.blocks import (
    dense_mlp,
    embedding_and_output,
    grouped_query_attention,
    mixture_of_experts,
)
from converters.architectures.common import (
    decoder_dimensions,
    expert_dimensions,
    gpt_model,
    grouped_queries,
    rms_norm_decoder,
    tied_copies,
)
from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.multi_token_prediction import multi_token_prediction
from converters.architectures.rotary import rotary_embedding
from converters.architectures.routing import sigmoid_routing, sigmoid_routing_extensions
from converters.architectures.weight_map import Architecture, Parameter

MODEL_TYPES = ("glm4_moe",)


def read(config: HuggingFaceConfig) -> Architecture:
    """The Megatron model of a GLM-4.5 config.json."""
    layers = range(config["num_hidden_layers"])
    moe_layers = layers[config["first_k_dense_replace"] :]
    mtp_layers = range(len(layers), len(layers) + config.get("num_nextn_predict_layers", 0))
    mtp = multi_token_prediction(
        _layers(config, mtp_layers, mtp_layers if moe_layers else ()),
        mtp_layers,
        hidden_size=config["hidden_size"],
        tied=config.tied,
    )
    return Architecture(
        model_type=config["model_type"],
        hf_config=config.fields,
        transformer_config={
            **rms_norm_decoder(config),
            **grouped_queries(config, config.head_dim),
            "qk_layernorm": config.get("use_qk_norm", False),
            "add_qkv_bias": config.get("attention_bias", False),
            **(sigmoid_routing(config, moe_layers) if moe_layers else {}),
            **mtp.transformer_config,
        },
        gpt_model=gpt_model(config, rotary_embedding(config, partial=0.5)),
        multi_latent_attention=False,
        num_experts=config.num_experts if moe_layers else 0,
        dimensions={**decoder_dimensions(config, config.head_dim), **expert_dimensions(config), **mtp.dimensions},
        weight_map=(*embedding_and_output(tied=config.tied), *_layers(config, layers, moe_layers), *mtp.weight_map),
        hf_copies={**tied_copies(config), **mtp.hf_copies},
        exported_copies=tuple(mtp.hf_copies),
        mtp_layers=len(mtp_layers),
        extensions=sigmoid_routing_extensions(config, moe_layers),
    )


def _layers(config: HuggingFaceConfig, layers: range, moe_layers: Collection[int]) -> tuple[Parameter, ...]:
    return (
        *grouped_query_attention(
            layers, qk_norm=config.get("use_qk_norm", False), qkv_bias=config.get("attention_bias", False)
        ),
        *dense_mlp(set(layers) - set(moe_layers)),
        *mixture_of_experts(moe_layers, expert_bias=True, shared_experts=config.get("n_shared_experts", 0) > 0),
    )
