"""Memory of a trainer rank: state from its elements, activations from the layers and micro-batches in flight."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Any

from converters.architectures import Architecture, Lora, adapter_architecture
from converters.dtypes import short_name
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.planning.memory.activations import (
    FUSED,
    PLAIN,
    Kept,
    Kernels,
    Recompute,
    kept_by_layer,
    layer_bytes,
    layer_input_bytes,
    module_bytes,
)
from megarl.planning.memory.gathered import gathered_elements
from megarl.planning.memory.rank_weights import RankWeights, rank_weights, stage_layers
from megatron_ext.log_probs import CHUNK_LOGITS

_LOGIT_COPIES = 3
_FLOAT32 = 4
_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "uint8": 1}
"""Bytes per element of the dtypes that Megatron's options name."""
_LABEL_BYTES = 20 + 16 + 12
"""Kept per label for the backward pass: what `linear_log_probs` saves (one int64, three float32), token and position
(two int64), and, as an estimate for the loss, three float32.
"""
_STAGE_TENSORS = 6
"""Hidden states that exist at once for a moment: a layer's input and output, and their gradients."""


@dataclass(frozen=True)
class TrainingOptions:
    """Megatron's options that affect memory and time; bytes are per element."""

    recompute: Recompute = field(default_factory=Recompute)
    kernels: Kernels = FUSED
    weight_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: float = 12
    """On the GPU: the float32 main parameter and Adam's two moments."""
    is_distributed: bool = True
    """Data-parallel ranks shard the optimizer state, if they have whole weights."""
    expert_load: float = 1.0
    """Tokens routed to the experts of the busiest rank, relative to the mean."""
    lora: Lora | None = None
    """The adapter that is trained instead of the weights."""
    predicts: bool = True
    """Multi-token-prediction layers are trained; otherwise the trainer holds them unchanged."""
    keeps_reference: bool = False
    """A copy of the weights is kept for the KL or the loss; an adapter needs none."""

    @classmethod
    def of(cls, megatron: Mapping[str, Any], dtype: str = "bf16") -> "TrainingOptions":
        """Read the options of the `megatron` group for weights in `dtype`, bf16 or fp32."""
        moments = sum(_width(megatron.get(name)) for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
        # In a float32 model, the weights are the main parameters.
        main = 0 if dtype == "fp32" else _width(megatron.get("main_params_dtype"))
        if megatron.get("use_precision_aware_optimizer") and megatron.get("store_param_remainders", True):
            # Transformer Engine's Adam stores only the half of a float32 that the bf16 weight lacks.
            main = main - _WIDTHS["bf16"] if main == _FLOAT32 and not megatron.get("optimizer_cpu_offload") else main
        away = megatron.get("optimizer_offload_fraction", 1.0) if megatron.get("optimizer_cpu_offload") else 0.0
        # Without the precision-aware optimizer, Megatron keeps main parameters on the GPU besides their host copies.
        kept = main * (1 - away) if megatron.get("use_precision_aware_optimizer") else main
        return cls(
            recompute=Recompute.of(megatron),
            kernels=PLAIN if megatron.get("transformer_impl") == "local" or dtype == "fp32" else FUSED,
            weight_bytes=_WIDTHS[dtype],
            gradient_bytes=_FLOAT32 if megatron.get("grad_reduce_in_fp32", True) else _WIDTHS[dtype],
            optimizer_bytes=kept + moments * (1 - away),
            is_distributed=megatron.get("use_distributed_optimizer", True),
        )


def _width(dtype: Any) -> int:
    return _WIDTHS[short_name(dtype or "fp32")]


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of a rank of one pipeline stage."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    reference: int
    """A copy of the policy's initial weights."""
    gathered: int
    """Peak of whole weights and gradients under FSDP2; the other parts are rows then."""
    activations: int
    """Peak of what the micro-batches in flight keep for the backward pass."""
    working: int
    """Temporary tensors: logits in chunks, and the hidden states around one layer."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Name of a part -> bytes."""
        return {name: value for name, value in vars(self).items() if name != "stage"}


def trainer_memory(
    architecture: Architecture,
    parallel: ParallelSizes,
    options: TrainingOptions,
    *,
    micro_batch_tokens: float,
    micro_batches: int,
) -> list[TrainerMemory]:
    """Memory of a rank of each pipeline stage.

    `micro_batch_tokens` counts the tokens of a micro-batch before context parallelism splits it; `micro_batches` counts
    the micro-batches of an update.
    """
    tokens = micro_batch_tokens / parallel.context_parallel_size
    return [
        _stage(architecture, parallel, options, stage, tokens, micro_batches)
        for stage in range(parallel.pipeline_model_parallel_size)
    ]


def _stage(
    architecture: Architecture,
    parallel: ParallelSizes,
    options: TrainingOptions,
    stage: int,
    tokens: float,
    micro_batches: int,
) -> TrainerMemory:
    weights = rank_weights(architecture, parallel, stage)
    running = architecture if options.predicts else architecture.without_mtp
    adapter = adapter_architecture(running, options.lora) if options.lora else None
    trained = rank_weights(adapter or running, parallel, stage)
    held = weights.total + (trained.total if adapter else 0)
    hidden = layer_input_bytes(architecture, parallel, options.weight_bytes)
    kept = _kept(running, parallel, options, stage, micro_batches)
    logits = _LOGIT_COPIES * _FLOAT32 * CHUNK_LOGITS if stage == parallel.pipeline_model_parallel_size - 1 else 0
    return TrainerMemory(
        stage=stage,
        weights=held * options.weight_bytes,
        gradients=trained.total * options.gradient_bytes,
        optimizer=round(_optimizer_elements(trained, parallel, options) * options.optimizer_bytes),
        reference=weights.total * options.weight_bytes if options.keeps_reference and not adapter else 0,
        gathered=gathered_elements(running, parallel) * options.weight_bytes if parallel.use_torch_fsdp2 else 0,
        activations=round(tokens * kept),
        working=round(tokens * hidden * _STAGE_TENSORS + logits),
    )


def _optimizer_elements(weights: RankWeights, parallel: ParallelSizes, options: TrainingOptions) -> float:
    if parallel.use_torch_fsdp2 or not options.is_distributed:
        return weights.total
    return weights.shared / parallel.weight_copies + weights.experts / parallel.expert_copies


def _kept(
    architecture: Architecture, parallel: ParallelSizes, options: TrainingOptions, stage: int, micro_batches: int
) -> float:
    """Bytes per token of a micro-batch, for everything that is kept at once on a stage."""
    recompute = options.recompute
    hidden = layer_input_bytes(architecture, parallel, options.weight_bytes)
    rows = _rows(architecture, parallel, options, stage)
    each = [layer_bytes(of_layer, recompute) for of_layer in rows]
    flying = micro_batches_in_flight(parallel, stage, micro_batches)
    ends = _ends(architecture, parallel, options, stage)
    if not recompute.is_full:
        # While a module is recomputed, everything after it in its micro-batch has been freed.
        parts = (module_bytes(of_layer, recompute) for of_layer in rows)
        before = [kept + part for kept, part in zip(accumulate(each), parts, strict=True)]
        return (flying - 1) * (sum(each) + ends) + max(sum(each) + ends, *before)
    own = len(stage_layers(architecture, parallel, stage))
    again = [*_recomputed(each[:own], recompute), *([one] for one in each[own:])]
    # While a layer is recomputed, the results of its micro-batch have been freed, and so have the layers after it.
    kept = hidden * len(again) + sum(each) - sum(map(sum, again))
    before = [hidden * (number + 1) + sum(group) for number, group in enumerate(again)]
    if len(each) > own:
        # The model's own results are still kept while a multi-token-prediction layer is recomputed.
        before[-1] += ends
    return (flying - 1) * (kept + ends) + max(kept + ends, *before)


def _rows(
    architecture: Architecture, parallel: ParallelSizes, options: TrainingOptions, stage: int
) -> list[list[Kept]]:
    """The rows of each layer of a stage. Multi-token-prediction layers, on the last stage, are like its last layer.

    They begin with norms of a hidden state and of an embedding, and a projection of the two.
    """
    layers = stage_layers(architecture, parallel, stage)
    predicting = architecture.mtp_layers if stage == parallel.pipeline_model_parallel_size - 1 else 0
    hidden = architecture.transformer_config["hidden_size"] / parallel.tensor_model_parallel_size
    rows = [
        kept_by_layer(
            architecture,
            parallel,
            layer,
            options.kernels,
            element_bytes=options.weight_bytes,
            expert_load=options.expert_load,
        )
        for layer in [*layers, *[architecture.num_layers - 1] * predicting]
    ]
    projection = Kept("projection", 2 * (options.kernels.norm_bytes + options.weight_bytes) * hidden)
    return [*rows[: len(layers)], *([*row, projection] for row in rows[len(layers) :])]


def _recomputed(each: Sequence[float], recompute: Recompute) -> list[Sequence[float]]:
    """The groups of layers that are recomputed together, from `each`, the bytes of a stage's layers."""
    if recompute.is_block:
        return [each[layer : layer + 1] for layer in range(min(recompute.layers, len(each)))]
    return [each[start : start + recompute.layers] for start in range(0, len(each), recompute.layers)]


def micro_batches_in_flight(parallel: ParallelSizes, stage: int, micro_batches: float = inf) -> float:
    """Peak number of micro-batches whose activations a stage keeps, in units of all its layers.

    The schedule is 1F1B (arXiv 2104.04473): a stage is ahead by as many micro-batches as stages follow. With
    interleaved chunks, it is ahead by the chunks that megatron-core's `get_pp_rank_microbatches` starts with. An update
    with fewer `micro_batches` keeps only those.
    """
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.chunks
    if chunks == 1:
        return min(stages - stage, micro_batches)
    ahead = (stages - stage - 1) * 2 + (chunks - 1) * stages + 1
    return min(ahead, micro_batches * chunks) / chunks


def _ends(architecture: Architecture, parallel: ParallelSizes, options: TrainingOptions, stage: int) -> float:
    """Bytes per token of the last norm and of the log-probabilities, on the last stage."""
    if stage != parallel.pipeline_model_parallel_size - 1:
        return 0.0
    hidden = architecture.transformer_config["hidden_size"]
    norm = options.kernels.norm_bytes * hidden / parallel.tensor_model_parallel_size
    return (norm + options.weight_bytes * hidden + _LABEL_BYTES) * (1 + architecture.mtp_layers)
