"""How each kind of parameter is put together from HuggingFace tensors and cut over ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from converters.architectures import Dimension, Kind
from converters.boxes import Box


@dataclass(frozen=True)
class Piece:
    """`start` to `stop`, along the cut's axis, of the HuggingFace tensor number `source` of a parameter."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True)
class Cut:
    """A rank's part of a parameter: the pieces that follow each other along `axis`, then padding."""

    axis: int
    pieces: Sequence[Piece]
    padding: int = 0

    @property
    def length(self) -> int:
        """Of the rank's tensor along `axis`."""
        return sum(piece.stop - piece.start for piece in self.pieces) + self.padding


def interval(shape: Sequence[int], axis: int, start: int, stop: int) -> Box:
    """The box of a tensor of `shape` that is whole but along `axis`."""
    box = Box.whole(shape)
    return Box((*box.start[:axis], start, *box.start[axis + 1 :]), (*box.stop[:axis], stop, *box.stop[axis + 1 :]))


def cut(kind: Kind, dimensions: Sequence[Sequence[Dimension]], part: int, parts: int) -> Cut:
    """Part `part` of `parts` of a parameter of `kind`, whose HuggingFace tensors have these `dimensions`.

    The units of a dimension that is cut must be a multiple of `parts`, except with `Kind.VOCABULARY`.
    """
    return _CUTS[kind](dimensions, part, parts)


def cut_dimensions(kind: Kind, dimensions: Sequence[Sequence[Dimension]]) -> list[Dimension]:
    """The dimensions of which every part must get the same number of units."""
    if kind in (Kind.REPLICATED, Kind.VOCABULARY):
        return []
    return [shape[1 if kind is Kind.ROW else 0] for shape in dimensions]


def _even(source: int, dimension: Dimension, part: int, parts: int) -> Piece:
    length = dimension.units // parts * dimension.unit_size
    return Piece(source, part * length, (part + 1) * length)


def _replicated(dimensions: Sequence[Sequence[Dimension]], part: int, parts: int) -> Cut:  # noqa: ARG001
    return Cut(0, [Piece(0, 0, dimensions[0][0].size)])


def _column(dimensions: Sequence[Sequence[Dimension]], part: int, parts: int) -> Cut:
    return Cut(0, [_even(0, dimensions[0][0], part, parts)])


def _row(dimensions: Sequence[Sequence[Dimension]], part: int, parts: int) -> Cut:
    return Cut(1, [_even(0, dimensions[0][1], part, parts)])


def _gated(dimensions: Sequence[Sequence[Dimension]], part: int, parts: int) -> Cut:
    return Cut(0, [_even(source, shape[0], part, parts) for source, shape in enumerate(dimensions)])


def _qkv(dimensions: Sequence[Sequence[Dimension]], part: int, parts: int) -> Cut:
    groups = dimensions[1][0].units
    local_groups = range(part * groups // parts, (part + 1) * groups // parts)
    return Cut(
        0, [_even(source, shape[0], group, groups) for group in local_groups for source, shape in enumerate(dimensions)]
    )


def _vocabulary(dimensions: Sequence[Sequence[Dimension]], part: int, parts: int) -> Cut:
    size = dimensions[0][0].size
    length = -(-size // parts)
    start, stop = min(part * length, size), min((part + 1) * length, size)
    return Cut(0, [Piece(0, start, stop)] if start < stop else [], padding=length - (stop - start))


_CUTS: Mapping[Kind, Callable[[Sequence[Sequence[Dimension]], int, int], Cut]] = {
    Kind.REPLICATED: _replicated,
    Kind.COLUMN: _column,
    Kind.ROW: _row,
    Kind.GATED: _gated,
    Kind.QKV: _qkv,
    Kind.VOCABULARY: _vocabulary,
}
