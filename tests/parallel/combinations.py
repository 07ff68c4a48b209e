"""Every way to cut the models below, one of each kind, over at most eight processes, by Megatron's rules alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from converters.layouts.parallel_sizes import ParallelSizes

PROCESSES = 8
FEWEST_LAYERS, MOST_LAYERS = 2, 14
"""A model has a layer for each chunk of PP x VPP: with 14, two stages of up to seven chunks, and seven of two."""
EXPERTS = (4, 6, 8, 10, 14)
"""A model has the fewest of these that EP cuts evenly: the more, the longer it takes."""
HEADS = (8, 6, 12, 10, 14)
"""A model has the first of these that TP and ETP cut evenly, and TP its keys and values, too."""
QUERIES = 2
"""Heads that look at the same keys and values."""

_SMALL: Mapping[str, Any] = {
    "vocab_size": 63,  # TP 2, 4, 5, 6 and 8 do not divide it
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
_ROUTED: Mapping[str, Any] = {
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}


@dataclass(frozen=True)
class Kind:
    """A kind of model: a family of transformers, what makes it small, and options of Megatron."""

    model_type: str
    fields: Mapping[str, Any]
    experts: str | None = "n_routed_experts"
    """The family's name for their number; None without any."""
    megatron: Mapping[str, Any] = field(default_factory=dict)
    queries: int = QUERIES
    """Heads that look at the same keys and values."""
    shared_prefixes: bool = False
    """Layouts share the prefixes of their sequences, and are compared with one process that does not."""


_MOE = {**_SMALL, "num_experts_per_tok": 2, "norm_topk_prob": True}
_PLAIN: Mapping[str, Kind] = {
    # Biases and an embedding that is the output layer, too.
    "dense": Kind("qwen2", {**_SMALL, "tie_word_embeddings": True}, experts=None),
    "MoE, alltoall": Kind("qwen3_moe", _MOE, "num_experts"),
    "MoE, allgather": Kind("qwen3_moe", _MOE, "num_experts", {"moe_token_dispatcher_type": "allgather"}),
    "MLA": Kind(
        "deepseek_v3",
        {
            **_SMALL,
            **_ROUTED,
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_nextn_predict_layers": 0,
        },
        queries=1,
    ),
    "MTP": Kind("glm4_moe", {**_SMALL, **_ROUTED, "num_nextn_predict_layers": 1, "attention_bias": True}),
}
KINDS: Mapping[str, Kind] = {
    **_PLAIN,
    "dense, shared": replace(_PLAIN["dense"], shared_prefixes=True),
    "MoE, shared": replace(_PLAIN["MoE, alltoall"], shared_prefixes=True),
    "MLA, shared": replace(_PLAIN["MLA"], shared_prefixes=True),
}
"""The columns of the table."""


@dataclass(frozen=True)
class Size:
    """The numbers in which models of a kind differ."""

    layers: int
    experts: int
    heads: int

    def fields(self, kind: Kind) -> dict[str, Any]:
        """Fields of a model of `kind`, by HuggingFace's names: all that TP and ETP cut are multiples of the heads."""
        found = {
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // kind.queries,
            "hidden_size": 4 * self.heads,
            "intermediate_size": 6 * self.heads,
        }
        if kind.experts:
            found |= {kind.experts: self.experts, "moe_intermediate_size": 2 * self.heads}
        return {**kind.fields, **found}


@dataclass(frozen=True)
class Layout:
    """Parallel sizes, and the size of the model that they cut."""

    sizes: ParallelSizes
    model: Size

    def __str__(self) -> str:
        return name_of(self.sizes)


def name_of(sizes: ParallelSizes) -> str:
    """Sizes other than 1 by their short names, such as TP2 PP2 VPP2; an ETP that differs from TP, even if it is 1."""
    values = {
        "TP": sizes.tensor_model_parallel_size,
        "CP": sizes.context_parallel_size,
        "PP": sizes.pipeline_model_parallel_size,
        "VPP": sizes.chunks,
        "DP": sizes.data_parallel_size,
        "EP": sizes.expert_model_parallel_size,
    }
    named = [f"{name}{value}" for name, value in values.items() if value > 1]
    if sizes.expert_tensor_size != sizes.tensor_model_parallel_size:
        named.append(f"ETP{sizes.expert_tensor_size}")
    return " ".join(named) or "one process"


def layouts(kind: Kind) -> Iterator[Layout]:
    """Every layout of `kind`, from one process to `PROCESSES`.

    Attention is cut by TP x CP x DP x PP and experts by ETP x EP x (their DP) x PP, both over all processes. CP leaves
    no rank a whole prefix to share.
    """
    numbers = range(1, PROCESSES + 1)
    for world, tensor, context, pipeline in product(numbers, repeat=4):
        if world % (tensor * context * pipeline) or (kind.shared_prefixes and context > 1):
            continue
        for chunks, (expert, expert_tensor) in product(_chunks(pipeline), _expert_sizes(kind, world // pipeline)):
            sizes = ParallelSizes(
                world_size=world,
                tensor_model_parallel_size=tensor,
                context_parallel_size=context,
                pipeline_model_parallel_size=pipeline,
                virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
                expert_model_parallel_size=expert,
                expert_tensor_parallel_size=expert_tensor,
            )
            yield Layout(sizes, _model_of(sizes))


def _model_of(sizes: ParallelSizes) -> Size:
    """The model that `sizes` cut."""
    tensor = sizes.tensor_model_parallel_size
    return Size(
        max(FEWEST_LAYERS, sizes.pipeline_model_parallel_size * sizes.chunks),
        next(number for number in EXPERTS if number % sizes.expert_model_parallel_size == 0),
        next(
            number
            for number in HEADS
            if number % tensor == number % sizes.expert_tensor_size == 0 and _cuts_keys(tensor, number // QUERIES)
        ),
    )


def _cuts_keys(tensor: int, heads: int) -> bool:
    """Whether each of `tensor` ranks can have as many heads of keys and values, or as many ranks the same one."""
    return heads % tensor == 0 or tensor % heads == 0


def _chunks(pipeline: int) -> range:
    """How many chunks each of `pipeline` stages can have."""
    return range(1, MOST_LAYERS // pipeline + 1 if pipeline > 1 else 2)


def _expert_sizes(kind: Kind, ranks: int) -> list[tuple[int, int | None]]:
    """EP and ETP over the `ranks` of a pipeline stage; ETP is None for models that have no experts."""
    if kind.experts is None:
        return [(1, None)]
    return [
        (expert, expert_tensor)
        for expert, expert_tensor in product(range(1, ranks + 1), repeat=2)
        if ranks % (expert * expert_tensor) == 0
    ]
