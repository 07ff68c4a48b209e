"""Every way to cut the models below, one of each kind, over at most eight processes, by Megatron's rules alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from converters.layouts.parallel_sizes import ParallelSizes

PROCESSES = 8
LAYERS, EXPERTS = (2, 4, 8), (4, 8)
"""A model has the fewest of these layers and experts that a layout can cut evenly: the more, the longer it takes."""
HEADS, KEY_VALUE_HEADS, EXPERT_WIDTH = 8, 4, 16

_SMALL: Mapping[str, Any] = {
    "vocab_size": 63,  # no number of ranks divides it
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
_ROUTED: Mapping[str, Any] = {
    "moe_intermediate_size": EXPERT_WIDTH,
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


_MOE = {**_SMALL, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_WIDTH, "norm_topk_prob": True}
KINDS: Mapping[str, Kind] = {
    # Biases and an embedding that is the output layer, too.
    "dense": Kind("qwen2", {**_SMALL, "tie_word_embeddings": True}, experts=None),
    "MoE, alltoall": Kind("qwen3_moe", _MOE, "num_experts"),
    "MoE, allgather": Kind("qwen3_moe", _MOE, "num_experts", {"moe_token_dispatcher_type": "allgather"}),
    "MLA": Kind(
        "deepseek_v3",
        {
            **_SMALL,
            **_ROUTED,
            "num_key_value_heads": HEADS,
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_nextn_predict_layers": 0,
        },
    ),
    "MTP": Kind("glm4_moe", {**_SMALL, **_ROUTED, "num_nextn_predict_layers": 1, "attention_bias": True}),
}
"""The columns of the table."""


@dataclass(frozen=True)
class Size:
    """The numbers in which models of a kind differ."""

    layers: int
    experts: int


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

    Attention is cut by TP x CP x DP x PP and experts by ETP x EP x (their DP) x PP, both over all processes. Heads and
    experts are cut evenly, layers over all chunks.
    """
    numbers = range(1, PROCESSES + 1)
    for world, tensor, context, pipeline in product(numbers, repeat=4):
        if world % (tensor * context * pipeline) or HEADS % tensor:
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
            yield Layout(sizes, Size(_fewest(LAYERS, pipeline * chunks), _fewest(EXPERTS, expert)))


def _fewest(numbers: Sequence[int], parts: int) -> int:
    return next(number for number in numbers if number % parts == 0)


def _chunks(pipeline: int) -> list[int]:
    """How many chunks each of `pipeline` stages can have."""
    chunks = range(1, LAYERS[-1] // pipeline + 1 if pipeline > 1 else 2)
    return [each for each in chunks if LAYERS[-1] % (pipeline * each) == 0]


def _expert_sizes(kind: Kind, ranks: int) -> list[tuple[int, int | None]]:
    """EP and ETP over the `ranks` of a pipeline stage; ETP is None for models that have no experts."""
    if kind.experts is None:
        return [(1, None)]
    return [
        (expert, expert_tensor)
        for expert, expert_tensor in product(range(1, ranks + 1), repeat=2)
        if ranks % (expert * expert_tensor) == 0 and EXPERTS[-1] % expert == 0 and EXPERT_WIDTH % expert_tensor == 0
    ]
