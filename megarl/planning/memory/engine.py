"""Memory of an engine rank: weights, room for keys and values, and workspace."""

from dataclasses import dataclass, replace

from converters.architectures import Architecture, Lora, adapter_architecture
from converters.architectures.blocks import GATE_UP_DOWN
from converters.architectures.lora import target_names
from converters.errors import UserError
from converters.layouts.cuts import ENGINES
from converters.layouts.parallel_sizes import ParallelSizes
from converters.number_formats import NumberFormat
from megarl.planning.memory.activations import has_experts
from megarl.planning.memory.rank_weights import RankWeights, rank_weights

_BF16 = 2
_HIDDEN_COPIES = 8
"""Number of tensors as wide as the hidden state that exist at once in a prefill, at least."""
_AROUND, _MLP_COPIES = 3, 3
"""Tensors that exist while a layer multiplies: its residual, input and output; and gate, up and their product."""
_CONTEXT_TOKENS = 65536
"""Tokens of context whose keys and values a prefill makes of their latents at once, at most, in vLLM."""
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Matrices that engines fuse."""
_CONTEXT_BYTES = 3e9
"""The CUDA context, NCCL's buffers and CUDA graphs: as vLLM logs for an H100, beside weights and KV cache."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of an engine rank."""

    weights: int
    working: int
    kv_token: float
    """Bytes of one token's keys and values."""
    kv_cache: int
    """Room left for keys and values; negative if there is none."""
    attention_ranks: int
    """Number of attention data-parallel ranks, each with its own sequences."""

    @property
    def tokens(self) -> int:
        """Number of tokens that fit into the KV cache of the whole engine."""
        return max(0, int(self.kv_cache / self.kv_token)) * self.attention_ranks


def engine_memory(
    architecture: Architecture,
    parallel: ParallelSizes,
    number_format: NumberFormat | None,
    *,
    memory_bytes: float,
    utilization: float,
    prefill_tokens: int,
    kv_bytes: int = _BF16,
    kv_ranks: int = 1,
    computes_beside: bool = False,
) -> EngineMemory:
    """Memory of a rank of an engine with the sizes `parallel`, which uses `utilization` of a GPU with `memory_bytes`.

    The engine computes `prefill_tokens` prompt tokens at a time. For `kv_bytes` and `kv_ranks`, and the UserError they
    may cause, see `kv_token_bytes`. With `computes_beside`, `utilization` applies to the memory that CUDA leaves free,
    and covers only weights, keys and values.
    """
    weights = engine_weight_bytes(architecture, parallel, number_format)
    groups = parallel.world_size // parallel.tensor_model_parallel_size
    widths = engine_activation_bytes(
        architecture, prefill_tokens, parallel.tensor_model_parallel_size, groups, parallel.expert_tensor_size
    )
    if computes_beside:
        room = utilization * (memory_bytes - _CONTEXT_BYTES)
    else:
        room = utilization * memory_bytes - widths - _CONTEXT_BYTES
    return EngineMemory(
        weights=round(weights),
        working=round(widths + _CONTEXT_BYTES),
        kv_token=kv_token_bytes(architecture, parallel, kv_bytes, kv_ranks),
        kv_cache=round(room - weights),
        attention_ranks=groups,
    )


def engine_activation_bytes(
    architecture: Architecture, prefill_tokens: int, parts: int, attention_ranks: int, expert_parts: int
) -> int:
    """Workspace bytes of a rank if each attention data-parallel rank computes `prefill_tokens` prompt tokens.

    Attention and dense layers are cut into `parts`, and each expert into `expert_parts`.
    """
    config = architecture.transformer_config
    around = _AROUND * config["hidden_size"]
    widest = max(_HIDDEN_COPIES * config["hidden_size"], around + _MLP_COPIES * _dense_width(architecture) / parts)
    elements = prefill_tokens * widest
    if architecture.multi_latent_attention:
        heads, made = config["num_attention_heads"] / parts, config["qk_head_dim"] + config["v_head_dim"]
        of_token = around + heads * (made + config["qk_pos_emb_head_dim"])
        elements = max(elements, prefill_tokens * of_token + _CONTEXT_TOKENS * heads * made)
    return int(elements * _BF16) + expert_workspace_bytes(architecture, prefill_tokens * attention_ranks, expert_parts)


def _dense_width(architecture: Architecture) -> int:
    """Width of the MLP of dense layers; 0 if there are none."""
    is_dense = any(not has_experts(architecture, layer) for layer in range(architecture.num_layers))
    return int(architecture.transformer_config["ffn_hidden_size"]) if is_dense else 0


def expert_workspace_bytes(architecture: Architecture, tokens: int, expert_parts: int) -> int:
    """Bytes of two buffers with a row per token and chosen expert: the experts' inputs, and their outputs.

    As vLLM's Triton kernel allocates them (`TritonExperts.workspace_shapes`), wherever the chosen experts are.
    """
    if not architecture.num_experts:
        return 0
    config = architecture.transformer_config
    hidden, width = config["hidden_size"], config["moe_ffn_hidden_size"] // expert_parts
    return int(tokens * config["moe_router_topk"] * _BF16 * (max(width, hidden) + max(2 * width, hidden)))


def engine_weights(architecture: Architecture, parallel: ParallelSizes) -> RankWeights:
    """Number of elements of the parameters of an engine's first rank."""
    return rank_weights(architecture, parallel, 0, ENGINES)


def engine_weight_bytes(
    architecture: Architecture, parallel: ParallelSizes, number_format: NumberFormat | None
) -> float:
    """Bytes of a rank's weights: embedding and output layer in bf16, all others in the engine's format, with scales.

    Norms and routers also stay in bf16, but are too small to count separately.
    """
    weights = engine_weights(architecture, parallel)
    in_bf16 = weights.embedding + weights.output
    if number_format is not None:
        in_bf16 += _absorbed_elements(architecture, parallel)
    return in_bf16 * _BF16 + (weights.dense + weights.experts) * element_bytes(number_format)


def _absorbed_elements(architecture: Architecture, parallel: ParallelSizes) -> int:
    """Elements of the matrices by which latent attention decodes, which engines make of the codes of `kv_b_proj`.

    In bf16 they are views of the weight.
    """
    config = architecture.transformer_config
    if not architecture.multi_latent_attention:
        return 0
    heads = config["num_attention_heads"] // parallel.tensor_model_parallel_size
    width = config["qk_head_dim"] + config["v_head_dim"]
    return int(architecture.num_layers * heads * width * config["kv_lora_rank"])


def adapter_slot_bytes(architecture: Architecture, parallel: ParallelSizes, lora: Lora) -> int:
    """Bytes of a rank's slot for an adapter in bf16, which has room for all matrices that engines fuse with its own."""
    adapter = adapter_architecture(architecture, lora)
    names, every = set(target_names(adapter)), Lora(lora.rank, lora.alpha)
    fused = [each for each in _FUSED if not names.isdisjoint(each)]
    if any(parameter.is_expert for parameter in adapter.weight_map):
        fused.append(GATE_UP_DOWN)
    known = set(target_names(adapter_architecture(architecture, every)))
    whole = replace(lora, target_modules=tuple(sorted(names.union(*fused) & known)))
    return _BF16 * rank_weights(adapter_architecture(architecture, whole), parallel, 0, ENGINES).total


def element_bytes(number_format: NumberFormat | None) -> float:
    """Bytes per element of a matrix, including its share of a scale."""
    if number_format is None:
        return _BF16
    rows, columns = number_format.block
    return number_format.codes.itemsize / number_format.elements_per_code + number_format.scales.itemsize / (
        rows * columns
    )


def kv_token_bytes(
    architecture: Architecture, parallel: ParallelSizes, kv_bytes: int = _BF16, kv_ranks: int = 1
) -> float:
    """Bytes of a token's keys and values on a rank; latent attention keeps one latent on every rank.

    Each element takes `kv_bytes`. With `kv_ranks`, that many ranks with the same keys and values share the tokens, and
    the result is a mean, since a rank holds whole tokens. Raises UserError if fewer ranks have the same.
    """
    config, tensor = architecture.transformer_config, parallel.tensor_model_parallel_size
    if architecture.multi_latent_attention:
        width, alike = config["kv_lora_rank"] + config["qk_pos_emb_head_dim"], tensor
    else:
        groups = config["num_query_groups"]
        width, alike = 2 * max(1.0, groups / tensor) * config["kv_channels"], max(1, tensor // groups)
    if alike % kv_ranks:
        raise UserError(
            f"decode_context_parallel_size {kv_ranks} shares out tokens to ranks with the same keys and values, and"
            f" with attention over {tensor} ranks {alike} have the same: set it to a divisor of {alike}"
        )
    return float(architecture.num_layers * width * kv_bytes) / kv_ranks
