"""Qwen2 and Qwen2.5 (arXiv 2412.15115), dense: attention with a bias on query, key and value."""

from converters.architectures.blocks import dense_mlp, embedding_and_output, grouped_query_attention
from converters.architectures.common import (
    decoder_dimensions,
    gpt_model,
    grouped_queries,
    refuse_sliding_window,
    rms_norm_decoder,
    tied_copies,
)
from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.rotary import rotary_embedding
from converters.architectures.weight_map import Architecture

MODEL_TYPES = ("qwen2",)


def read(config: HuggingFaceConfig) -> Architecture:
    """The Megatron model of a Qwen2 config.json."""
    refuse_sliding_window(config)
    config.require("use_mrope", (False,), False)
    # Dual chunk attention, with which models with a context of a million tokens attend beyond a chunk.
    config.require("dual_chunk_attention_config", (None,), None)
    layers = range(config["num_hidden_layers"])
    return Architecture(
        model_type=config["model_type"],
        hf_config=config.fields,
        transformer_config={
            **rms_norm_decoder(config),
            **grouped_queries(config, config.head_dim),
            "add_qkv_bias": True,
        },
        gpt_model=gpt_model(config, rotary_embedding(config)),
        multi_latent_attention=False,
        num_experts=0,
        dimensions=decoder_dimensions(config, config.head_dim),
        weight_map=(
            *embedding_and_output(tied=config.tied),
            *grouped_query_attention(layers, qkv_bias=True),
            *dense_mlp(layers),
        ),
        hf_copies=tied_copies(config),
    )
