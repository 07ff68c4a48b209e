"""Locates HuggingFace tensors in the chunks of a checkpoint, whatever sizes it was saved with."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import sub

from converters.architectures import Architecture, Kind, Parameter
from converters.boxes import Box
from converters.errors import UserError
from converters.layout import Placement, Shape
from converters.layouts.megatron import ParameterPart, whole_parameter
from converters.layouts.torch_dist.keys import Cell, cells

_ALIASES: Mapping[str, str] = {
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
}
"""Suffix of a key -> the fused norm's suffix, under which megatron-core's local modules may have saved the parameter.
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a chunk that belongs to one layer and expert: nearly always the whole chunk.

    It is treated as a tensor of its own with `name` and `shape`, without the leading dimensions for layers and experts.
    """

    name: str
    key: str
    chunk: int
    """The chunk's index among those of `key`."""
    index: tuple[int, ...]
    """The index in the chunk's leading dimensions."""
    shape: Shape
    placements: Sequence[Placement]
    padding: Sequence[Box]


def stored_pieces(
    architecture: Architecture, shapes: Mapping[str, Shape], chunks: Mapping[str, Sequence[Box]]
) -> Iterator[Piece]:
    """Locate the HuggingFace tensors in the chunks of a checkpoint, given by key; yields pieces in model order.

    Rows of the vocabulary beyond `vocab_size` are padding.

    Raises UserError for a key of the model that is missing or has another shape, and for surplus keys.
    """
    overlaps = _Overlaps(architecture)
    uniform = not any(re.match(r"decoder\.layers\.\d", key) for key in shapes)
    by_index: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for cell in cells(architecture, uniform=uniform):
        key, leading = _stored_key(cell, shapes), len(cell.index)
        if key not in by_index:
            _check_shape(cell, overlaps.part(cell.parameter).shape, key, shapes[key])
            by_index[key] = _by_index(chunks[key], leading)
        names, boxes = cell.hf_names, chunks[key]
        for number in by_index[key].get(cell.index, ()):
            chunk = boxes[number]
            start = chunk.start[leading:]
            found = overlaps.of(cell.parameter, Box(start, chunk.stop[leading:]))
            name = f"{key}@{','.join(map(str, cell.index + start))}"
            index = tuple(map(sub, cell.index, chunk.start))
            placements = [Placement(names[source], hf, name, local) for source, hf, local in found.filled]
            yield Piece(name, key, number, index, found.shape, placements, found.padding)
    if surplus := sorted(shapes.keys() - by_index.keys()):
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        raise UserError(
            f"the checkpoint holds {surplus[0]}{more}, which a {architecture.model_type} model of this config.json"
            " does not have; the two do not belong together"
        )


def _stored_key(cell: Cell, shapes: Mapping[str, Shape]) -> str:
    if cell.key in shapes:
        return cell.key
    local = cell.parameter.megatron.rpartition("}.")[2]
    for name in (local, _ALIASES.get(local, local)):
        te_name = (cell.parameter.transformer_engine or cell.parameter.megatron).rpartition("}.")[2]
        if (key := cell.key.removesuffix(te_name) + name) in shapes:
            return key
    raise UserError(
        f"the checkpoint lacks {cell.key}, which the model of config.json has; the two do not belong together,"
        " or the checkpoint is incomplete"
    )


def _check_shape(cell: Cell, shape: Shape, key: str, stored: Shape) -> None:
    expected = (*cell.leading, *shape)
    axis = len(cell.leading)
    padded = cell.parameter.kind is Kind.VOCABULARY and len(stored) == len(expected) and stored[axis] > expected[axis]
    if padded:
        expected = (*expected[:axis], stored[axis], *expected[axis + 1 :])
    if stored != expected:
        raise UserError(
            f"the checkpoint holds {key} with shape {list(stored)}, where config.json gives {list(expected)}; the two"
            " do not belong together"
        )


def _by_index(boxes: Sequence[Box], leading: int) -> dict[tuple[int, ...], list[int]]:
    """Index in the leading dimensions -> indices of the boxes that have elements there."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, box in enumerate(boxes):
        for index in product(*map(range, box.start[:leading], box.stop[:leading])):
            found.setdefault(index, []).append(number)
    return found


@dataclass(frozen=True, slots=True)
class _Overlap:
    shape: Shape
    filled: list[tuple[int, Box, Box]]
    """Index of the HuggingFace tensor, box in it, box in the piece."""
    padding: list[Box]


class _Overlaps:
    """The HuggingFace boxes in a box of a parameter, cached because they are the same for all layers and experts."""

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self._parts: dict[int, ParameterPart] = {}
        self._found: dict[tuple[int, Box], _Overlap] = {}

    def part(self, parameter: Parameter) -> ParameterPart:
        if (found := self._parts.get(id(parameter))) is None:
            found = self._parts[id(parameter)] = whole_parameter(self._architecture, parameter)
        return found

    def of(self, parameter: Parameter, box: Box) -> _Overlap:
        if (found := self._found.get((id(parameter), box))) is None:
            found = self._found[id(parameter), box] = self._intersect(self.part(parameter), box)
        return found

    def _intersect(self, part: ParameterPart, box: Box) -> _Overlap:
        filled = []
        for source, hf_box, local_box in part.pieces:
            if piece := box.intersect(local_box):
                hf_piece = piece.relative_to(local_box).shift(hf_box.start)
                filled.append((source, hf_piece, piece.relative_to(box)))
        whole = box.intersect(Box.whole(part.shape))
        padding = box.subtract(whole) if whole else [box]
        return _Overlap(box.shape, filled, [each.relative_to(box) for each in padding])
