"""Mixtral (arXiv 2401.04088): every layer a mixture of experts, whose weights are a softmax over the chosen ones."""

from converters.architectures.blocks import embedding_and_output, grouped_query_attention, mixture_of_experts
from converters.architectures.common import (
    decoder_dimensions,
    expert_dimensions,
    expert_routing,
    gpt_model,
    grouped_queries,
    rms_norm_decoder,
    tied_copies,
)
from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.rotary import rotary_embedding
from converters.architectures.weight_map import Architecture

MODEL_TYPES = ("mixtral",)

_WIDTH = "intermediate_size"  # an expert's: there is no MLP beside them


def read(config: HuggingFaceConfig) -> Architecture:
    """The Megatron model of a Mixtral config.json."""
    config.require("sliding_window", (None,), None)
    layers = range(config["num_hidden_layers"])
    return Architecture(
        model_type=config["model_type"],
        hf_config=config.fields,
        transformer_config={
            **rms_norm_decoder(config),
            **grouped_queries(config, config.head_dim),
            **expert_routing(config, width=_WIDTH),
            "moe_layer_freq": 1,
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": False,
        },
        gpt_model=gpt_model(config, rotary_embedding(config)),
        multi_latent_attention=False,
        num_experts=config.num_experts,
        dimensions={**decoder_dimensions(config, config.head_dim), **expert_dimensions(config, width=_WIDTH)},
        weight_map=(
            *embedding_and_output(tied=config.tied),
            *grouped_query_attention(layers),
            *mixture_of_experts(layers, hf_module="block_sparse_moe", hf_projections=("w1", "w3", "w2")),
        ),
        hf_copies=tied_copies(config),
    )
