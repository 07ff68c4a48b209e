"""Llama 3.1 and 3.2 (arXiv 2407.21783)."""

from converters.architectures.blocks import dense_mlp, embedding_and_output, grouped_query_attention
from converters.architectures.common import (
    decoder_dimensions,
    gpt_model,
    grouped_queries,
    rms_norm_decoder,
    tied_copies,
)
from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.rotary import rotary_embedding
from converters.architectures.weight_map import Architecture

MODEL_TYPES = ("llama",)


def read(config: HuggingFaceConfig) -> Architecture:
    """The Megatron model of a Llama config.json."""
    config.require("attention_bias", (False,), False)
    config.require("mlp_bias", (False,), False)
    layers = range(config["num_hidden_layers"])
    return Architecture(
        model_type=config["model_type"],
        hf_config=config.fields,
        transformer_config={**rms_norm_decoder(config), **grouped_queries(config, config.head_dim)},
        gpt_model=gpt_model(config, rotary_embedding(config)),
        multi_latent_attention=False,
        num_experts=0,
        dimensions=decoder_dimensions(config, config.head_dim),
        weight_map=(
            *embedding_and_output(tied=config.tied),
            *grouped_query_attention(layers),
            *dense_mlp(layers),
        ),
        hf_copies=tied_copies(config),
    )
