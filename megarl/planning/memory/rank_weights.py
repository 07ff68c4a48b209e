"""How many elements of a model a rank has, counted by the weight map: by kinds, without naming each tensor."""

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
"""How the parameters at the ends of a model begin, and the kind that they are."""


class RankWeights(NamedTuple):
    """Elements of a rank's parameters."""

    embedding: int
    """The embedding, which is looked up."""
    output: int
    """The output layer, unless it is the embedding, too."""
    dense: int
    """All else that every token meets: attention, norms, dense and shared MLPs, routers."""
    experts: int
    """Routed experts, of which a token meets a few."""
    tied: int = 0
    """Elements of the embedding that are the output layer, too."""

    @property
    def logits(self) -> int:
        """Elements that make logits."""
        return self.output + self.tied

    @property
    def multiplied(self) -> int:
        """Elements with which every token is multiplied."""
        return self.logits + self.dense

    @property
    def shared(self) -> int:
        """Elements that all ranks of a data-parallel group, context-parallel ones among them, have alike."""
        return self.embedding + self.output + self.dense

    @property
    def total(self) -> int:
        """All of them."""
        return self.shared + self.experts


def rank_weights(
    architecture: Architecture, parallel: ParallelSizes, stage: int, rules: CutRules = MEGATRON
) -> RankWeights:
    """Elements of the parameters on a rank of pipeline stage `stage`; the first, if ranks differ by padding or rows."""
    counts = dict.fromkeys(RankWeights._fields, 0)
    for parameter, layers in stage_parameters(architecture, parallel, stage):
        elements = prod(part_shape(architecture, parallel, parameter, stage, rules)) * layers
        if parameter.is_expert:
            elements *= architecture.num_experts // parallel.expert_model_parallel_size
        counts[_kind(parameter)] += elements
    # A last stage that is not the first has a copy of its own.
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
    """The shape of a parameter on the first rank of a pipeline stage, under FSDP2 that of its rows."""
    at = RankCoordinates(tensor=0, context=0, pipeline=stage, expert=0, expert_tensor=0)
    rows, *others = shape = parameter_part(architecture, parallel, parameter, at, rules).shape
    if parallel.use_torch_fsdp2 and not parameter.is_buffer:
        return len(rows_of(rows, 0, parallel.weight_copies)), *others
    return shape


def stage_layers(architecture: Architecture, parallel: ParallelSizes, stage: int) -> list[int]:
    """Global indices of the layers of a pipeline stage, those of all its chunks."""
    return [
        layer for chunk in range(parallel.chunks) for layer in parallel.layers(architecture.num_layers, stage, chunk)
    ]


def stage_parameters(
    architecture: Architecture, parallel: ParallelSizes, stage: int
) -> Iterator[tuple[Parameter, int]]:
    """Each parameter of a pipeline stage, and how many layers of the stage have it."""
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
