"""The layout of a model on Megatron ranks: TP, PP, virtual PP, EP and ETP."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from converters.architectures import Architecture, Dimension, Parameter, Part
from converters.boxes import Box
from converters.errors import UserError, nearest_sizes
from converters.layout import Layout, Placement, Shape, Shard
from converters.layouts.chunk_names import chunk_prefixes
from converters.layouts.cuts import MEGATRON, CutRules, cut, interval, undividable
from converters.layouts.parallel_sizes import ParallelSizes, RankCoordinates
from converters.layouts.rows import cut_rows

__all__ = ["ModuleNames", "ParallelSizes", "check_divisible", "cut_layout", "megatron_layout"]

ModuleNames = Literal["local", "te"]
"""Parameter names of megatron-core's local specs with SequentialMLP, or of its Transformer Engine specs."""


def megatron_layout(architecture: Architecture, parallel: ParallelSizes, *, module_names: ModuleNames) -> Layout:
    """The layout of the HuggingFace tensors of `architecture` in the GPTModel state of every rank.

    With several model chunks per rank, names in chunk `i` begin with `model{i}.`. With FSDP2, a rank's tensors are the
    rows that it holds.

    Raises UserError if heads, experts, layers or MLP widths are not divisible by the sizes.
    """
    return cut_layout(architecture, parallel, module_names, MEGATRON)


def cut_layout(
    architecture: Architecture, parallel: ParallelSizes, module_names: ModuleNames, rules: CutRules
) -> Layout:
    """The layout on ranks of these sizes, by any rules. Raises UserError as `megatron_layout` does."""
    check_divisible(architecture, parallel, rules)
    cuts = _Cuts(architecture, parallel, module_names, rules)
    return Layout(parallel.world_size, architecture.hf_shapes, cuts.shard, cuts.only)


def check_divisible(architecture: Architecture, parallel: ParallelSizes, rules: CutRules = MEGATRON) -> None:
    """Raise UserError if heads, experts, layers or MLP widths are not divisible by the sizes."""
    parallel.layers_of_stages(architecture.num_layers)
    experts, ranks = architecture.num_experts, parallel.expert_model_parallel_size
    if not experts and ranks > 1:
        raise UserError(f"the model has no experts for expert_model_parallel_size = {ranks} to divide; leave it at 1")
    if not experts and parallel.expert_tensor_size not in (1, parallel.tensor_model_parallel_size):
        raise UserError(
            f"the model has no experts for expert_tensor_parallel_size = {parallel.expert_tensor_size} to cut; leave it"
            " out"
        )
    if experts % ranks:
        nearest = nearest_sizes(ranks, lambda size: experts % size == 0, experts)
        raise UserError(
            f"the model's {experts} experts cannot be divided by expert_model_parallel_size = {ranks}; change that size"
            f" to {nearest}"
        )
    for parameter in architecture.weight_map:
        name, parts = "tensor_model_parallel_size", parallel.tensor_model_parallel_size
        if parameter.is_expert:
            name, parts = "expert_tensor_parallel_size", parallel.expert_tensor_size
        if dimension := undividable(parameter.kind, architecture.dimensions_of(parameter), parts, rules):
            alike = [each for each in architecture.weight_map if each.is_expert == parameter.is_expert]
            raise UserError(
                f"the model's {dimension.field} = {dimension.units} cannot be divided by {name} = {parts};"
                f" change that size to {_nearest_cuts(architecture, alike, parts, dimension, rules)}"
            )


def _nearest_cuts(
    architecture: Architecture, parameters: Sequence[Parameter], parts: int, dimension: Dimension, rules: CutRules
) -> str:
    largest = 2 * max(parts, dimension.units)

    def fits(size: int) -> bool:
        return not any(undividable(each.kind, architecture.dimensions_of(each), size, rules) for each in parameters)

    return nearest_sizes(parts, fits, largest)


@dataclass(frozen=True)
class ParameterPart:
    """A rank's part of a parameter, without names, which differ by layer and expert."""

    shape: Shape
    pieces: list[tuple[int, Box, Box]]
    """Number of the HuggingFace tensor, box in it, box in the rank's tensor."""
    padding: Box | None


def parameter_part(
    architecture: Architecture,
    parallel: ParallelSizes,
    parameter: Parameter,
    at: RankCoordinates,
    rules: CutRules = MEGATRON,
) -> ParameterPart:
    index, parts = at.tensor, parallel.tensor_model_parallel_size
    if parameter.is_expert:
        index, parts = at.expert_tensor, parallel.expert_tensor_size
    dimensions = architecture.dimensions_of(parameter)
    rank_cut = cut(parameter.kind, dimensions, index, parts, rules)
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
    """A parameter of the model as a single rank would hold it, without padding."""
    return parameter_part(architecture, ParallelSizes(), parameter, ParallelSizes().coordinates(0))


def _layers(
    architecture: Architecture, parallel: ParallelSizes, parameter: Parameter, at: RankCoordinates, chunk: int
) -> Iterator[tuple[int, int]]:
    """Global and local index of each layer of a model chunk that has `parameter`; one pair if it is outside layers."""
    layers: Iterable[int]
    if parameter.part is Part.LAYERS:
        layers = parallel.layers(architecture.num_layers, at.pipeline, chunk)
    elif not _on_chunk(parallel, parameter.part, at.pipeline, chunk):
        return
    elif parameter.part is Part.MTP:
        layers = range(architecture.num_layers, architecture.num_layers + architecture.mtp_layers)
    else:
        yield 0, 0
        return
    for local_layer, layer in enumerate(layers):
        if layer in parameter.layers:
            yield layer, local_layer


def _on_chunk(parallel: ParallelSizes, part: Part, pipeline_rank: int, chunk: int) -> bool:
    first = pipeline_rank == 0 and chunk == 0
    last = pipeline_rank == parallel.pipeline_model_parallel_size - 1 and chunk == parallel.chunks - 1
    return {Part.FIRST: first, Part.LAST: last, Part.MTP: last, Part.COPY_ON_LAST: last and not first}[part]


_Wanted = Mapping[tuple[int, int], Collection[int]]
"""(Index of a parameter in the weight map, layer) -> experts. Layer and expert are 0 for parameters outside of them."""


class _Cuts:
    """The cuts of a model over ranks. Caches the parts that several ranks have in common."""

    def __init__(
        self, architecture: Architecture, parallel: ParallelSizes, module_names: ModuleNames, rules: CutRules
    ) -> None:
        self._architecture = architecture
        self._parallel = parallel
        self._module_names = module_names
        self._rules = rules
        self._parts: dict[tuple[int, int, int], ParameterPart] = {}

    def shard(self, rank: int, wanted: _Wanted | None = None) -> Shard:
        """The shard of `rank`, or only the `wanted` parts of it."""
        whole, parallel = self._whole_shard(rank, wanted), self._parallel
        if not parallel.use_torch_fsdp2:
            return whole
        buffers = [
            parameter.megatron.rpartition(".")[2] for parameter in self._architecture.weight_map if parameter.is_buffer
        ]
        kept = {name for name in whole.local_shapes if name.rpartition(".")[2] in buffers}
        return cut_rows(whole, parallel.weight_copy(rank), parallel.weight_copies, kept)

    def _whole_shard(self, rank: int, wanted: _Wanted | None) -> Shard:
        architecture, parallel = self._architecture, self._parallel
        at = parallel.coordinates(rank)
        shapes: dict[str, Shape] = {}
        placements: list[Placement] = []
        padding: list[tuple[str, Box]] = []
        for number, parameter in enumerate(architecture.weight_map):
            megatron = parameter.megatron
            if self._module_names == "te" and parameter.transformer_engine:
                megatron = parameter.transformer_engine
            part = self._part(number, at)
            for chunk, prefix in enumerate(chunk_prefixes(parallel.chunks)):
                for layer, local_layer in _layers(architecture, parallel, parameter, at, chunk):
                    experts = self._experts(parameter, at)
                    first = experts.start
                    held: Sequence[int] = experts
                    if wanted is not None:
                        held = [expert for expert in experts if expert in wanted.get((number, layer), ())]
                    names = _names(prefix + megatron, local_layer, [expert - first for expert in held])
                    hf_names = [_names(hf_name, layer, held) for hf_name, _ in parameter.huggingface]
                    for position, name in enumerate(names):
                        shapes[name] = part.shape
                        for source, hf_box, local_box in part.pieces:
                            placements.append(Placement(hf_names[source][position], hf_box, name, local_box))
                    if part.padding:
                        padding.extend((name, part.padding) for name in names)
        return Shard(shapes, placements, padding)

    def only(self, hf_names: Collection[str]) -> Callable[[int], Sequence[Placement]]:
        """`Layout.placements_of`, without computing the rest of the model."""
        wanted: dict[tuple[int, int], set[int]] = defaultdict(set)
        for number, parameter in enumerate(self._architecture.weight_map):
            experts = range(self._architecture.num_experts if parameter.is_expert else 1)
            for layer in parameter.layers or [0]:
                for hf_name, _ in parameter.huggingface:
                    for expert, name in zip(experts, _names(hf_name, layer, experts), strict=True):
                        if name in hf_names:
                            wanted[number, layer].add(expert)
        return lambda rank: [each for each in self.shard(rank, wanted).placements if each.hf_name in hf_names]

    def _part(self, number: int, at: RankCoordinates) -> ParameterPart:
        """A rank's part of a parameter, which ranks with the same tensor coordinates share."""
        key = number, at.tensor, at.expert_tensor
        if key not in self._parts:
            parameter = self._architecture.weight_map[number]
            self._parts[key] = parameter_part(self._architecture, self._parallel, parameter, at, self._rules)
        return self._parts[key]

    def _experts(self, parameter: Parameter, at: RankCoordinates) -> range:
        if not parameter.is_expert:
            return range(1)
        experts = self._architecture.num_experts // self._parallel.expert_model_parallel_size
        return range(at.expert * experts, (at.expert + 1) * experts)


def _names(template: str, layer: int, experts: Iterable[int]) -> list[str]:
    """The names of a parameter in a layer, one per expert of `experts` if each has its own."""
    # Not str.format, which is slower: over all ranks, a model has hundreds of thousands of names.
    head, has_experts, tail = template.replace("{layer}", str(layer)).partition("{expert}")
    return [f"{head}{expert}{tail}" for expert in experts] if has_experts else [head for _ in experts]
