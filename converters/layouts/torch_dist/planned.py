"""Plans the chunks of a checkpoint to write, cut along the ranks that will read it."""

from dataclasses import dataclass

from converters.architectures import Architecture, Kind, Parameter, Part
from converters.boxes import Box
from converters.layout import Shape
from converters.layouts.cuts import interval
from converters.layouts.megatron import whole_parameter
from converters.layouts.parallel_sizes import ParallelSizes
from converters.layouts.torch_dist.keys import Cell, cells, has_uniform_layers


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A chunk to write: a box of the tensor `key`, for one or more ranks, the first of which is `rank`."""

    key: str
    box: Box
    rank: int
    hf_names: tuple[str, ...]
    """The HuggingFace tensors that its elements come from."""


def plan_chunks(
    architecture: Architecture, parallel: ParallelSizes, padded_vocabulary: int
) -> tuple[dict[str, Shape], list[PlannedChunk]]:
    """Return shapes by key, and chunks cut so that each rank of `parallel` reads whole chunks."""
    shapes: dict[str, Shape] = {}
    chunks: list[PlannedChunk] = []
    stage_of = _stages(architecture, parallel)
    cuts = {id(each): _grid(architecture, parallel, each, padded_vocabulary) for each in architecture.weight_map}
    for cell in cells(architecture, uniform=has_uniform_layers(architecture)):
        shape, boxes = cuts[id(cell.parameter)]
        shapes[cell.key] = (*cell.leading, *shape)
        end = tuple(i + 1 for i in cell.index)
        first_rank = _first_rank(architecture, parallel, cell, stage_of[cell.parameter.part, cell.layer])
        for part, box in boxes:
            chunks.append(
                PlannedChunk(cell.key, Box(cell.index + box.start, end + box.stop), first_rank + part, cell.hf_names)
            )
    return shapes, chunks


def _grid(
    architecture: Architecture, parallel: ParallelSizes, parameter: Parameter, padded_vocabulary: int
) -> tuple[Shape, list[tuple[int, Box]]]:
    """The shape of a parameter, and its chunks with the tensor-parallel rank of each."""
    shape = list(whole_parameter(architecture, parameter).shape)
    ranks = parallel.expert_tensor_size if parameter.is_expert else parallel.tensor_model_parallel_size
    axis = 1 if parameter.kind is Kind.ROW else 0
    if parameter.kind is Kind.VOCABULARY:
        shape[0] = padded_vocabulary
    # Megatron saves and reads gate and up separately.
    parts = {Kind.REPLICATED: 1, Kind.GATED: 2 * ranks}.get(parameter.kind, ranks)
    length = shape[axis] // parts
    return tuple(shape), [
        (part % ranks, interval(shape, axis, part * length, (part + 1) * length)) for part in range(parts)
    ]


def _stages(architecture: Architecture, parallel: ParallelSizes) -> dict[tuple[Part, int | None], int]:
    """The pipeline stage of every layer, and of each part outside the layers."""
    last = parallel.pipeline_model_parallel_size - 1
    stages: dict[tuple[Part, int | None], int] = {(Part.FIRST, None): 0, (Part.LAST, None): last}
    for stage in range(parallel.pipeline_model_parallel_size):
        for chunk in range(parallel.chunks):
            for layer in parallel.layers(architecture.num_layers, stage, chunk):
                stages[Part.LAYERS, layer] = stage
    for layer in range(architecture.num_layers, architecture.num_layers + architecture.mtp_layers):
        stages[Part.MTP, layer] = last
    return stages


def _first_rank(architecture: Architecture, parallel: ParallelSizes, cell: Cell, stage: int) -> int:
    rank = stage * parallel.stage_ranks
    if cell.parameter.is_expert:
        experts_per_rank = architecture.num_experts // parallel.expert_model_parallel_size
        rank += cell.expert // experts_per_rank * parallel.expert_tensor_size
    return rank
