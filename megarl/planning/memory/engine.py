"""Memory of an engine's rank: weights, the room for keys and values, and what the engine works with."""

from dataclasses import dataclass

from converters.architectures import Architecture
from converters.errors import UserError
from converters.layouts.cuts import ENGINES
from converters.layouts.parallel_sizes import ParallelSizes
from converters.number_formats import NumberFormat
from megarl.planning.memory.rank_weights import RankWeights, rank_weights

_BF16 = 2
_HIDDEN_COPIES = 8
"""Tensors as wide as the hidden state that a prefill has at once."""
_CONTEXT_BYTES = 3e9
"""The CUDA context, NCCL's buffers and recorded graphs: what vLLM's log says of an H100 beside weights and cache."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of a rank of an engine."""

    weights: int
    working: int
    kv_token: float
    """Keys and values of one token."""
    kv_cache: int
    """Room that is left for them; negative where there is none."""
    attention_ranks: int
    """Ranks with sequences of their own."""

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values the whole engine has room for."""
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
    """Memory of one rank of an engine with the sizes `parallel`, which takes `utilization` of a GPU of `memory_bytes`.

    The engine computes `prefill_tokens` of prompts at a time; for `kv_bytes` and `kv_ranks`, and the UserError they
    may raise, see `kv_token_bytes`. With `computes_beside` its share is of what CUDA leaves, and for weights, keys and
    values alone.
    """
    weights = engine_weight_bytes(engine_weights(architecture, parallel), number_format)
    groups = parallel.world_size // parallel.tensor_model_parallel_size
    widths = engine_activation_bytes(architecture, prefill_tokens, groups, parallel.expert_tensor_size)
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
    architecture: Architecture, prefill_tokens: int, attention_ranks: int, expert_parts: int
) -> int:
    """Bytes that a rank computes with when each rank with sequences of its own computes so many tokens of prompts.

    One expert is cut into `expert_parts`.
    """
    hidden = int(prefill_tokens * _BF16 * _HIDDEN_COPIES * architecture.transformer_config["hidden_size"])
    return hidden + expert_workspace_bytes(architecture, prefill_tokens * attention_ranks, expert_parts)


def expert_workspace_bytes(architecture: Architecture, tokens: int, expert_parts: int) -> int:
    """Bytes of two buffers with a row for each choice of each token: what goes into an expert, and what comes out.

    As vLLM's Triton kernel has them (`TritonExperts.workspace_shapes`), wherever the chosen experts are.
    """
    if not architecture.num_experts:
        return 0
    config = architecture.transformer_config
    hidden, width = config["hidden_size"], config["moe_ffn_hidden_size"] // expert_parts
    return int(tokens * config["moe_router_topk"] * _BF16 * (max(width, hidden) + max(2 * width, hidden)))


def engine_weights(architecture: Architecture, parallel: ParallelSizes) -> RankWeights:
    """Elements of the parameters of an engine's first rank."""
    return rank_weights(architecture, parallel, 0, ENGINES)


def engine_weight_bytes(weights: RankWeights, number_format: NumberFormat | None) -> float:
    """Bytes of a rank's weights: embedding and output layer in bf16, the others in the engine's format with its scales.

    Norms and routers, which stay in bf16 as well, are too few to be told apart.
    """
    in_bf16 = weights.embedding + weights.output
    return in_bf16 * _BF16 + (weights.dense + weights.experts) * element_bytes(number_format)


def element_bytes(number_format: NumberFormat | None) -> float:
    """Bytes of an element of a matrix, its share of a scale included."""
    if number_format is None:
        return _BF16
    rows, columns = number_format.block
    return number_format.codes.itemsize / number_format.elements_per_code + number_format.scales.itemsize / (
        rows * columns
    )


def kv_token_bytes(
    architecture: Architecture, parallel: ParallelSizes, kv_bytes: int = _BF16, kv_ranks: int = 1
) -> float:
    """Bytes of keys and values that a rank has of a token: latent attention keeps one latent on every rank.

    One number takes `kv_bytes`, and `kv_ranks` ranks that would have the same share out the tokens; a rank then has
    some tokens whole, and the bytes are a mean. Raises UserError where not as many ranks have the same.
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
