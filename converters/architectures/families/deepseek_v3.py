"""DeepSeek-V3 and R1 (arXiv 2412.19437), and models of its shape: Moonlight (arXiv 2502.16982), Kimi-K2 (2507.20534).

DeepSeek-V2 with a sigmoid router that a bias per expert balances, and with multi-token prediction.
"""

from converters.architectures import deepseek
from converters.architectures.blocks import embedding_and_output
from converters.architectures.common import rms_norm_decoder, tied_copies
from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.multi_token_prediction import MultiTokenPrediction, multi_token_prediction
from converters.architectures.routing import sigmoid_routing, sigmoid_routing_extensions
from converters.architectures.weight_map import Architecture

MODEL_TYPES = ("deepseek_v3", "kimi_k2")
_SAID = ("n_group", "topk_group", "routed_scaling_factor")
"""Router fields for which transformers, and engines with it, default to DeepSeek-V3's values."""


def read(config: HuggingFaceConfig) -> Architecture:
    """The Megatron model of a config.json of DeepSeek-V3 or a model of its shape."""
    layers = range(config["num_hidden_layers"])
    moe_layers = [layer for layer in layers if deepseek.has_experts(config, layer)]
    if moe_layers and (unsaid := [name for name in _SAID if config.fields.get(name) is None]):
        raise config.error(f"has no field {unsaid[0]}, and engines would take DeepSeek-V3's: add the model's own")
    mtp = _multi_token_prediction(config, layers)
    return Architecture(
        model_type=config["model_type"],
        hf_config=config.fields,
        transformer_config={
            **rms_norm_decoder(config),
            **deepseek.latent_attention_fields(config),
            **(sigmoid_routing(config, moe_layers) if moe_layers else {}),
            **mtp.transformer_config,
        },
        gpt_model=deepseek.gpt_model_arguments(config),
        multi_latent_attention=True,
        num_experts=config.num_experts if moe_layers else 0,
        dimensions={**deepseek.dimensions(config), **mtp.dimensions},
        weight_map=(
            *embedding_and_output(tied=config.tied),
            *deepseek.decoder_layers(config, layers, moe_layers, expert_bias=True),
            *mtp.weight_map,
        ),
        hf_copies={**tied_copies(config), **mtp.hf_copies},
        exported_copies=tuple(mtp.hf_copies),
        mtp_layers=config.get("num_nextn_predict_layers", 0),
        # Released Moonlight and Kimi-K2 checkpoints contain them, but config.json determines them.
        hf_unused=frozenset(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in layers),
        extensions=sigmoid_routing_extensions(config, moe_layers),
    )


def _multi_token_prediction(config: HuggingFaceConfig, layers: range) -> MultiTokenPrediction:
    mtp_layers = range(len(layers), len(layers) + config.get("num_nextn_predict_layers", 0))
    moe_layers = [layer for layer in mtp_layers if deepseek.has_experts(config, layer)]
    # Megatron-core builds them like the last layer.
    like_last = mtp_layers if deepseek.has_experts(config, len(layers) - 1) else ()
    if moe_layers != list(like_last):
        raise config.error("has multi-token-prediction layers that are not like its last layer, by moe_layer_freq")
    return multi_token_prediction(
        deepseek.decoder_layers(config, mtp_layers, moe_layers, expert_bias=True),
        mtp_layers,
        hidden_size=config["hidden_size"],
        tied=config.tied,
    )
