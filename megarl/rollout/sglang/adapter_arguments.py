"""Arguments of an SGLang engine that is only sent the adapter; the models and arguments that it does not support."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from converters.errors import UserError
from megarl.rollout.kind import Arguments
from megarl.rollout.slot_limits import SlotLimits

if TYPE_CHECKING:
    from converters.architectures import Architecture, Lora

ADAPTER_SLOT = "enable_lora"
"""Argument that megarl sets for an engine that is only sent the adapter."""
LORA_ALPHA = "megarl_lora_alpha"
"""Argument with the alpha of the adapter. It is megarl's own and is not passed to SGLang."""

_SLOT = SlotLimits(
    "SGLang",
    ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe"),
    {
        "ep_size": (None, 1),
        "load_format": (None, "auto", "safetensors"),
        "enable_lora_overlap_loading": (None, False),
        "moe_runner_backend": (None, "auto", "triton"),
        "disable_shared_experts_fusion": (None, True),
        "disable_chunked_prefix_cache": (None, True),
    },
)
"""Models and arguments with which engines were verified against transformers with an adapter in the slot."""


def _with_whole_experts(adapter: "Architecture", modules: Sequence[str]) -> list[str]:
    """Add all three matrices of an expert if any is adapted: SGLang has slots for all three or none."""
    from converters.architectures.blocks import GATE_UP_DOWN  # imports torch

    is_of_expert = any(".experts." in name for parameter in adapter.weight_map for name, _ in parameter.huggingface)
    return sorted({*modules, *(GATE_UP_DOWN if is_of_expert else ())})


def _check_latent(adapter: "Architecture", modules: Sequence[str]) -> None:
    """Raise UserError for modules of latent attention that SGLang has no place for in a model without q_lora_rank."""
    if not adapter.multi_latent_attention or adapter.transformer_config["q_lora_rank"]:
        return
    if unplaced := sorted({"q_proj", "kv_a_proj_with_mqa"} & set(modules)):
        raise UserError(
            f"{_SLOT.alone} has no place for that of {' and '.join(unplaced)} in a model without q_lora_rank: name"
            " modules without it in lora.target_modules, or set lora.merge=true"
        )


def _arguments_of_family(adapter: "Architecture", modules: Sequence[str]) -> Arguments:
    found: dict[str, bool | str] = {}
    if adapter.transformer_config.get("num_moe_experts") and "down_proj" in modules:
        # On Blackwell SGLang's choice takes no adapters, and it would fail to start.
        found["moe_runner_backend"] = "triton"
    if adapter.transformer_config.get("moe_shared_expert_intermediate_size"):
        # On a GPU SGLang fuses shared experts into the routed ones, where their adapters have no place.
        found["disable_shared_experts_fusion"] = True
    if "kv_b_proj" in modules:
        # SGLang would apply the adapters of later tokens to the keys and values of a cached prefix.
        found["disable_chunked_prefix_cache"] = True
    return found


def adapter_slot(arguments: Arguments, adapter: "Architecture", lora: "Lora", modules: Sequence[str]) -> Arguments:
    """See `EngineKind.adapter_slot`."""
    _SLOT.check_model(adapter)
    _SLOT.check_arguments(arguments)
    _check_latent(adapter, modules)
    heads, tensor = adapter.transformer_config["num_query_groups"], arguments.get("tp_size") or 1
    if heads % tensor:
        # On a CPU SGLang pads heads with zeros until they divide over workers, and shards adapters as if they were
        # padded, too.
        raise UserError(
            f"{_SLOT.alone} is for workers that have whole key-value heads, and rollout.engine_args.tp_size={tensor}"
            f" cuts {heads}: set that to a divisor of it, or lora.merge=true"
        )
    modules = _with_whole_experts(adapter, modules)
    return {
        **arguments,
        **_arguments_of_family(adapter, modules),
        ADAPTER_SLOT: True,
        "max_loras_per_batch": 1,
        "max_lora_rank": lora.rank,
        "lora_target_modules": modules,
        # By default SGLang skips modules that it has no place for, with only a line in its log.
        "lora_strict_loading": True,
        LORA_ALPHA: lora.alpha,
    }
