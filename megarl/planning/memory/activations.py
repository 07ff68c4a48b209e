"""Activations that layers keep for the backward pass, in closed form: rows of bytes per token.

The counts follow Korthikanti et al. (arXiv 2205.05198), extended to gated MLPs, experts, latent attention, and
attention that does not store scores. Sequence parallelism, which is enabled whenever TP is above 1, divides what tensor
parallelism does not.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from converters.architectures import Architecture
from converters.cost.compute import head_widths
from converters.layouts.parallel_sizes import ParallelSizes

_FLOAT32 = 4
_ROUTED_ENTRY, _EXPERT_ENTRY = 20, 8
"""Bytes that a router keeps per expert that a token is routed to, and per expert of the layer."""


@dataclass(frozen=True)
class Kernels:
    """Amounts that a device's modules keep, which depend on how far kernels are fused."""

    norm_bytes: int
    """Per element that a norm reads."""
    mlp_copies: int
    """Number of tensors as wide as an MLP: gate, up, the activation, their product."""
    expert_copies: int
    attention_is_plain: bool
    """Keys and values are repeated for all heads, their output is copied, and the rotary tables are kept."""


FUSED = Kernels(norm_bytes=2, mlp_copies=3, expert_copies=3, attention_is_plain=False)
"""Transformer Engine's modules and flash attention in bf16, as Megatron trains on GPUs."""
PLAIN = Kernels(norm_bytes=8, mlp_copies=5, expert_copies=6, attention_is_plain=True)
"""The modules of megatron-core that run on CPUs, in bf16; norms copy to float32."""


@dataclass(frozen=True)
class Recompute:
    """The parts that are recomputed in the backward pass, by Megatron's options.

    Example: Recompute(is_full=True, layers=1), or Recompute(modules=frozenset({"moe"}))
    """

    is_full: bool = False
    layers: int = 1
    """Layers that are recomputed at a time (uniform), or per stage (block)."""
    is_block: bool = False
    modules: frozenset[str] = frozenset()

    @classmethod
    def of(cls, megatron: Mapping[str, Any]) -> "Recompute":
        """Read the options of the `megatron` group."""
        granularity = megatron.get("recompute_granularity")
        return cls(
            is_full=granularity == "full",
            layers=megatron.get("recompute_num_layers") or 1,
            is_block=megatron.get("recompute_method") == "block",
            modules=frozenset(megatron.get("recompute_modules") or ["core_attn"])
            if granularity == "selective"
            else frozenset(),
        )


@dataclass(frozen=True)
class Kept:
    """A row: bytes kept per token, and the `recompute_modules` that avoid keeping them."""

    name: str
    nbytes: float
    spared_by: frozenset[str] = frozenset()


def layer_bytes(rows: Iterable[Kept], recompute: Recompute) -> float:
    """Bytes per token of a layer with these rows, unless it is recomputed as a whole."""
    return sum(row.nbytes for row in rows if not row.spared_by & recompute.modules)


def module_bytes(rows: Sequence[Kept], recompute: Recompute) -> float:
    """Bytes per token of the largest separately recomputed part of a layer, which exist while it is recomputed."""
    return max((sum(row.nbytes for row in rows if module in row.spared_by) for module in recompute.modules), default=0)


def layer_input_bytes(architecture: Architecture, parallel: ParallelSizes, element_bytes: int) -> float:
    """Bytes per token of a layer's input."""
    return element_bytes * architecture.transformer_config["hidden_size"] / parallel.tensor_model_parallel_size


def kept_by_layer(
    architecture: Architecture,
    parallel: ParallelSizes,
    layer: int,
    kernels: Kernels,
    *,
    element_bytes: int,
    expert_load: float,
) -> list[Kept]:
    """The rows of a layer, per token of a context-parallel rank.

    `expert_load` is the number of tokens routed to the rank's experts, relative to an even distribution.
    """
    return [
        *_attention(architecture, parallel, layer, kernels, element_bytes),
        *(
            _experts(architecture, parallel, kernels, element_bytes, expert_load)
            if has_experts(architecture, layer)
            else _mlp(architecture, parallel, kernels, element_bytes)
        ),
    ]


def has_experts(architecture: Architecture, layer: int) -> bool:
    """Whether a layer is a mixture of experts."""
    if not architecture.num_experts:
        return False
    pattern = architecture.transformer_config.get("moe_layer_freq", 1)
    return bool(pattern[layer]) if isinstance(pattern, list) else layer % pattern == 0


def _attention(
    architecture: Architecture, parallel: ParallelSizes, layer: int, kernels: Kernels, size: int
) -> list[Kept]:
    config, tp = architecture.transformer_config, parallel.tensor_model_parallel_size
    is_latent = architecture.multi_latent_attention
    key_width, value_width = head_widths(architecture)
    heads, groups = config["num_attention_heads"] / tp, max(1, config["num_query_groups"] / tp)
    hidden = config["hidden_size"] / tp
    norms = hidden * _hidden_norms(architecture, layer)
    # Transformer Engine fuses a norm into the product after it, except before latent attention and experts.
    apart = kernels.attention_is_plain or is_latent
    rows = [
        Kept("inputs of norms", size * norms),
        Kept("norms", (kernels.norm_bytes - size) * norms, frozenset({"layernorm"})),
        Kept("input of attention", size * hidden, frozenset({"layernorm"} if apart else ())),
        *(_latents if is_latent else _head_norms)(config, tp, kernels, size),
    ]
    up = frozenset({"mla_up_proj"} if is_latent else ())
    if not kernels.attention_is_plain:
        return [
            *rows,
            Kept("queries, keys and values", size * (heads * key_width + groups * (key_width + value_width)), up),
            Kept("attention", size * heads * value_width + _FLOAT32 * heads),
        ]
    # In this implementation, values and outputs are as wide as keys.
    core = size * (2 * (heads - groups) + heads) * key_width + _FLOAT32 * heads
    core += size * 2 * heads * key_width * _keys_before(parallel.context_parallel_size)
    return [
        *rows,
        Kept("queries, keys and values", size * (heads + 2 * groups) * key_width, up),
        Kept("core attention", core, frozenset({"core_attn"})),
        Kept("attention", size * heads * value_width + size * 4 * _rotary_width(config)),
    ]


def _keys_before(ranks: int) -> float:
    """Keys of other ranks that a rank of plain context parallelism keeps for its two chunks, in units of its own keys.

    Rank r has chunks r and 2 `ranks` - 1 - r, before which come as many chunks: 2 `ranks` - 1 in total.
    """
    return (2 * ranks - 1) / 2 if ranks > 1 else 0.0


def _rotary_width(config: Mapping[str, Any]) -> int:
    return config.get("qk_pos_emb_head_dim") or config.get("kv_channels", 0)


def _latents(config: Mapping[str, Any], tp: int, kernels: Kernels, size: int) -> list[Kept]:
    # The latents of queries and of keys and values are kept twice: as inputs of norms, and as inputs of up projections.
    widths = (config["q_lora_rank"] or 0) + config["kv_lora_rank"]
    return [Kept("latents", (kernels.norm_bytes + size) * widths / tp)]


def _head_norms(config: Mapping[str, Any], tp: int, kernels: Kernels, _size: int) -> list[Kept]:
    heads = config["num_attention_heads"] + config["num_query_groups"]
    width = heads * config["kv_channels"] / tp if config.get("qk_layernorm") else 0
    return [Kept("norms of queries and keys", kernels.norm_bytes * width)]


def _hidden_norms(architecture: Architecture, layer: int) -> int:
    """Number of a layer's norms that read the whole hidden state."""
    return sum(
        layer in parameter.layers and parameter.megatron.endswith("layernorm.weight") and dimensions == ("hidden",)
        for parameter in architecture.weight_map
        for _, dimensions in parameter.huggingface
    )


def _mlp(architecture: Architecture, parallel: ParallelSizes, kernels: Kernels, size: int) -> list[Kept]:
    config, tp = architecture.transformer_config, parallel.tensor_model_parallel_size
    return [
        # An unfused norm is not recomputed with the MLP, which then keeps its input; a fused one is recomputed only
        # with it.
        Kept(
            "input of the MLP",
            size * config["hidden_size"] / tp,
            frozenset({"layernorm" if kernels.attention_is_plain else "mlp"}),
        ),
        Kept("MLP", size * kernels.mlp_copies * config["ffn_hidden_size"] / tp, frozenset({"mlp"})),
    ]


def _experts(
    architecture: Architecture, parallel: ParallelSizes, kernels: Kernels, size: int, load: float
) -> list[Kept]:
    config, tp = architecture.transformer_config, parallel.tensor_model_parallel_size
    topk, moe = config["moe_router_topk"], frozenset({"moe"})
    # A token's copies are sent to the ranks of its experts, and as many arrive, so each rank has as many as before.
    shared = config.get("moe_shared_expert_intermediate_size") or 0
    hidden = size * config["hidden_size"] / tp
    rows = load * topk
    width = size * rows * config["moe_ffn_hidden_size"] / tp
    return [
        Kept("input of the experts", hidden, frozenset({"layernorm"})),
        Kept("router", (_ROUTED_ENTRY * topk + _EXPERT_ENTRY * architecture.num_experts) / tp, moe),
        Kept("tokens of experts", hidden * rows * parallel.expert_tensor_size, moe),
        Kept("experts", (kernels.expert_copies - 1) * width, moe),
        Kept("products of experts", width, moe | {"moe_act"}),
        Kept("shared experts", size * kernels.mlp_copies * shared / tp, frozenset({"moe", "shared_experts"})),
    ]
