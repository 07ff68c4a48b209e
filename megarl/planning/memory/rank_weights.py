"""Counts a rank's elements by kind, from the weight map, without naming each tensor."""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from converters.architectures import Architecture, Parameter, Part
from converters.layout import Shape
from converters.layouts.cuts import MEGATRON, CutRules
from converters.layouts.megatron import parameter_part
from converters.layouts.parallel_sizes import ParallelSizes, RankCoordinates
from converters.layouts.rows import rows_of

_ENDS = {"embedding.word_embeddings": "embedding", "output_layer": "output"}
"""Prefix of the parameters at the ends of a model -> their kind."""


class RankWeights(NamedTuple):
    """Number of elements of a rank's parameters."""

    embedding: int
    """The embedding, which is looked up."""
    output: int
    """The output layer, unless tied to the embedding."""
    dense: int
    """All other parameters that every token uses: attention, norms, dense and shared MLPs, routers."""
    experts: int
    """Routed experts, of which a token uses a few."""
    tied: int = 0
    """The elements of the embedding that are also the output layer."""

    @property
    def logits(self) -> int:
        """Elements that compute logits."""
        return self.output + self.tied

    @property
    def multiplied(self) -> int:
        """Elements that every token is multiplied with."""
        return self.logits + self.dense

    @property
    def shared(self) -> int:
        """Elements that are the same on all ranks of a data-parallel group, including its context-parallel ranks."""
        return self.embedding + self.output + self.dense

    @property
    def total(self) -> int:
        """All elements."""
        return self.shared + self.experts


def rank_weights(
    architecture: Architecture, parallel: ParallelSizes, stage: int, rules: CutRules = MEGATRON
) -> RankWeights:
    """Count the elements on a rank of pipeline stage `stage`; on its first, if ranks differ by padding or rows."""
    counts = dict.fromkeys(RankWeights._fields, 0)
    for parameter, layers in stage_parameters(architecture, parallel, stage):
        elements = prod(part_shape(architecture, parallel, parameter, stage, rules)) * layers
        if parameter.is_expert:
            elements *= architecture.num_experts // parallel.expert_model_parallel_size
        counts[_kind(parameter)] += elements
    # A last stage that is not the first has its own copy.
    if architecture.gpt_model["share_embeddings_and_output_weights"] and parallel.pipeline_model_parallel_size == 1:
        counts["tied"] = counts["embedding"]
    return RankWeights(**counts)


def _kind(parameter: Parameter) -> str:
    if parameter.is_expert:
        return "experts"
    return next((kind for name, kind in _ENDS.items() if parameter.megatron.startswith(name)), "dense")


def part_shape(
    architecture: Architecture,
    parallel: ParallelSizes,
    parameter: Parameter,
    stage: int,
    rules: CutRules = MEGATRON,
) -> Shape:
    """The shape of a parameter on the first rank of a pipeline stage; with FSDP2, of its rows."""
    at = RankCoordinates(tensor=0, context=0, pipeline=stage, expert=0, expert_tensor=0)
    rows, *others = shape = parameter_part(architecture, parallel, parameter, at, rules).shape
    if parallel.use_torch_fsdp2 and not parameter.is_buffer:
        return len(rows_of(rows, 0, parallel.weight_copies)), *others
    return shape


def stage_layers(architecture: Architecture, parallel: ParallelSizes, stage: int) -> list[int]:
    """Global indices of the layers of a pipeline stage, in all its chunks."""
    return [
        layer for chunk in range(parallel.chunks) for layer in parallel.layers(architecture.num_layers, stage, chunk)
    ]


def stage_parameters(
    architecture: Architecture, parallel: ParallelSizes, stage: int
) -> Iterator[tuple[Parameter, int]]:
    """Yield each parameter of a pipeline stage, and the number of the stage's layers that have it."""
    layers = set(stage_layers(architecture, parallel, stage))
    last = parallel.pipeline_model_parallel_size - 1
    on_stage = {Part.FIRST: stage == 0, Part.LAST: stage == last, Part.COPY_ON_LAST: 0 < stage == last}
    for parameter in architecture.weight_map:
        if parameter.part is Part.MTP:
            times = architecture.mtp_layers if stage == last else 0
        elif parameter.part is Part.LAYERS:
            times = len(parameter.layers & layers)
        else:
            times = int(on_stage[parameter.part])
        if times:
            yield parameter, times
