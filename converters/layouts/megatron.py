"""The layout of a model on Megatron ranks: TP, PP, virtual PP, EP and ETP."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from converters.architectures import Architecture, Parameter, Part
from converters.boxes import Box
from converters.errors import UserError
from converters.layout import Layout, Placement, Shape, Shard
from converters.layouts.cuts import cut, interval, undividable
from converters.layouts.parallel_sizes import ParallelSizes, RankCoordinates

__all__ = ["ModuleNames", "ParallelSizes", "megatron_layout"]

ModuleNames = Literal["local", "te"]
"""Parameter names of megatron-core's local specs with SequentialMLP, or of its Transformer Engine specs."""


def megatron_layout(architecture: Architecture, parallel: ParallelSizes, *, module_names: ModuleNames) -> Layout:
    """Where the HuggingFace tensors of `architecture` lie in the GPTModel state of every rank.

    With several model chunks per rank, the names of chunk `i` begin with `model{i}.`.
    Raises UserError where heads, experts, layers or MLP widths cannot be divided by the sizes.
    """
    _check_divisible(architecture, parallel)
    return Layout(parallel.world_size, architecture.hf_shapes, partial(_shard, architecture, parallel, module_names))


def _check_divisible(architecture: Architecture, parallel: ParallelSizes) -> None:
    parallel.layers_of_stages(architecture.num_layers)
    if architecture.num_experts % parallel.expert_model_parallel_size or (
        parallel.expert_model_parallel_size > 1 and not architecture.num_experts
    ):
        raise UserError(
            f"the model's {architecture.num_experts} experts cannot be divided by"
            f" expert_model_parallel_size = {parallel.expert_model_parallel_size}; change that size"
        )
    for parameter in architecture.weight_map:
        name, parts = "tensor_model_parallel_size", parallel.tensor_model_parallel_size
        if parameter.is_expert:
            name, parts = "expert_tensor_parallel_size", parallel.expert_tensor_size
        if dimension := undividable(parameter.kind, architecture.dimensions_of(parameter), parts):
            raise UserError(
                f"the model's {dimension.field} = {dimension.units} cannot be divided by {name} = {parts};"
                " change that size"
            )


@dataclass(frozen=True)
class ParameterPart:
    """A rank's part of a parameter, without the names, which differ by layer and expert."""

    shape: Shape
    pieces: list[tuple[int, Box, Box]]
    """Number of the HuggingFace tensor, box in it, box in the rank's tensor."""
    padding: Box | None


def parameter_part(
    architecture: Architecture, parallel: ParallelSizes, parameter: Parameter, at: RankCoordinates
) -> ParameterPart:
    index, parts = at.tensor, parallel.tensor_model_parallel_size
    if parameter.is_expert:
        index, parts = at.expert_tensor, parallel.expert_tensor_size
    dimensions = architecture.dimensions_of(parameter)
    rank_cut = cut(parameter.kind, dimensions, index, parts)
    sizes = [dimension.size for dimension in dimensions[0]]
    shape = (*sizes[: rank_cut.axis], rank_cut.length, *sizes[rank_cut.axis + 1 :])
    pieces, position = [], 0
    for piece in rank_cut.pieces:
        end = position + piece.stop - piece.start
        hf_shape = [dimension.size for dimension in dimensions[piece.source]]
        hf_box = interval(hf_shape, rank_cut.axis, piece.start, piece.stop)
        pieces.append((piece.source, hf_box, interval(shape, rank_cut.axis, position, end)))
        position = end
    padding = interval(shape, rank_cut.axis, position, rank_cut.length) if rank_cut.padding else None
    return ParameterPart(shape, pieces, padding)


def whole_parameter(architecture: Architecture, parameter: Parameter) -> ParameterPart:
    """A parameter of the model as one rank would have it, without padding."""
    return parameter_part(architecture, ParallelSizes(), parameter, RankCoordinates(0, 0, 0, 0))


def _indices(
    architecture: Architecture, parallel: ParallelSizes, parameter: Parameter, at: RankCoordinates, chunk: int
) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """Global and local indices of every layer and expert of a model chunk that has `parameter`."""
    layers: Iterable[int]
    if parameter.part is Part.LAYERS:
        layers = parallel.layers(architecture.num_layers, at.pipeline, chunk)
    elif not _on_chunk(parallel, parameter.part, at.pipeline, chunk):
        return
    elif parameter.part is Part.MTP:
        layers = range(architecture.num_layers, architecture.num_layers + architecture.mtp_layers)
    else:
        yield {}, {}
        return
    experts = architecture.num_experts // parallel.expert_model_parallel_size if parameter.is_expert else 1
    for local_layer, layer in enumerate(layers):
        if layer in parameter.layers:
            for expert in range(experts):
                yield (
                    {"layer": layer, "expert": at.expert * experts + expert},
                    {"layer": local_layer, "expert": expert},
                )


def _on_chunk(parallel: ParallelSizes, part: Part, pipeline_rank: int, chunk: int) -> bool:
    first = pipeline_rank == 0 and chunk == 0
    last = pipeline_rank == parallel.pipeline_model_parallel_size - 1 and chunk == parallel.chunks - 1
    return {Part.FIRST: first, Part.LAST: last, Part.MTP: last, Part.COPY_ON_LAST: last and not first}[part]


def _shard(architecture: Architecture, parallel: ParallelSizes, module_names: ModuleNames, rank: int) -> Shard:
    at = parallel.coordinates(rank)
    shapes: dict[str, Shape] = {}
    placements: list[Placement] = []
    padding: list[tuple[str, Box]] = []
    for parameter in architecture.weight_map:
        megatron = parameter.megatron
        if module_names == "te" and parameter.transformer_engine:
            megatron = parameter.transformer_engine
        part = parameter_part(architecture, parallel, parameter, at)
        for chunk in range(parallel.chunks):
            prefix = f"model{chunk}." if parallel.chunks > 1 else ""
            for hf_index, local_index in _indices(architecture, parallel, parameter, at, chunk):
                name = prefix + megatron.format(**local_index)
                shapes[name] = part.shape
                for source, hf_box, local_box in part.pieces:
                    hf_name = parameter.huggingface[source][0].format(**hf_index)
                    placements.append(Placement(hf_name, hf_box, name, local_box))
                if part.padding:
                    padding.append((name, part.padding))
    return Shard(shapes, placements, padding)
