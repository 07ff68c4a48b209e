"""Tiny models in HuggingFace form: real configurations and tokenizer, and random weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, read_json

PAD, END, USER, ASSISTANT = "<pad>", "<end>", "<user>", "<assistant>"
CHARACTERS = "0123456789+-*/=.,?#() abcdefghijklmnopqrstuvwxyz"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}<assistant>{{ message.content }}<end>"
    "{%- else -%}<user>{{ message.content }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)


@dataclass(frozen=True)
class TinyModel:
    """A recipe for a small model: its HuggingFace `model_type` and the fields that make it small."""

    model_type: str
    fields: Mapping[str, Any]
    initializer_range: float = 0.06
    tensors_not_initialised: Mapping[str, float] = field(default_factory=dict)


_DENSE = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}

TINY_MODELS: Mapping[str, TinyModel] = {
    "llama": TinyModel(
        "llama",
        {
            **_DENSE,
            # With this base some of the frequencies are scaled, some smoothed, and some unchanged.
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": 131072,
        },
    ),
    # A single key-value head, which tensor parallelism splits. vLLM does not support head_dim for this family.
    "qwen2": TinyModel(
        "qwen2",
        {**_DENSE, "hidden_size": 128, "num_key_value_heads": 1, "tie_word_embeddings": True},
        tensors_not_initialised={"_proj.bias": 0.1},
    ),
    "qwen3": TinyModel("qwen3", _DENSE),
    "qwen3_moe": TinyModel(
        "qwen3_moe",
        {
            **_DENSE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": TinyModel(
        "gemma2",
        {
            **_DENSE,
            "tie_word_embeddings": True,
            # transformers 5 omits it from the configuration; the released config.json has it.
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 20,
            # A window shorter than the sequences, and soft caps that scores and logits come near to.
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        tensors_not_initialised={"norm.weight": 0.1},
    ),
    "mixtral": TinyModel("mixtral", {**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": TinyModel(
        "glm4_moe",
        {
            **_DENSE,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
        },
        tensors_not_initialised={"e_score_correction_bias": 0.02, "_proj.bias": 0.1},
    ),
    "deepseek_v3": TinyModel(
        "deepseek_v3",
        {
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            # The latent and rotary sizes of the released model, as vLLM's CPU kernels support no others.
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            # transformers 5 omits these three from the configuration; the released config.json has them.
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
            "tie_word_embeddings": False,
            "max_position_embeddings": 512,
        },
        # If all experts had the same bias, placing it wrongly would go unnoticed.
        tensors_not_initialised={"e_score_correction_bias": 0.02},
    ),
}

_DENSE_IN_BLOCKS = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
IN_BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": _DENSE_IN_BLOCKS,
    "qwen3_moe": {**_DENSE_IN_BLOCKS, "moe_intermediate_size": 128},
    "deepseek_v3": {"hidden_size": 128, "intermediate_size": 256, "q_lora_rank": 128, "moe_intermediate_size": 128},
}
"""Fields that make the sizes of a tiny model multiples of 128, so that it fits FP8 blocks."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A character-level tokenizer of 64 tokens with a chat template."""
    specials = [PAD, END, USER, ASSISTANT]
    alphabet = specials + list(CHARACTERS)
    alphabet += [f"<unused{i}>" for i in range(64 - len(alphabet))]
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_tiny_model(
    name: str,
    folder: Path,
    *,
    seed: int = 0,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write the tiny model `name` (a key of `TINY_MODELS`) to `folder` as transformers would.

    `fields` override those of the model's recipe. Returns `folder`.
    """
    recipe = TINY_MODELS[name]
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(
        recipe.model_type,
        initializer_range=recipe.initializer_range,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
        **{"vocab_size": len(tokenizer), **recipe.fields, **(fields or {})},
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor_name, tensor in model.state_dict().items():
            for suffix, std in recipe.tensors_not_initialised.items():
                if tensor_name.endswith(suffix):
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if getattr(config, "num_nextn_predict_layers", 0):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            add_prediction_layers(folder, std=recipe.initializer_range)
    return folder


def add_prediction_layers(folder: Path, *, std: float) -> None:
    """Add a one-file model's multi-token-prediction layers of its config.json, which transformers never saves."""
    file = folder / "model.safetensors"
    tensors, architecture = load_file(file), read_architecture(read_json(folder / CONFIG))
    for name, shape in architecture.hf_shapes.items():
        if name not in tensors:
            is_norm = len(shape) == 1 and "bias" not in name
            tensors[name] = std * torch.randn(shape) + (1.0 if is_norm else 0.0)
    for copy in architecture.exported_copies:
        tensors[copy] = tensors[architecture.hf_copies[copy]].clone()
    save_file(tensors, file, metadata={"format": "pt"})
