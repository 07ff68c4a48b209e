"""Each kind of parameter: put together from HuggingFace tensors and cut over ranks."""

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
        """Length of the rank's tensor along `axis`."""
        return sum(piece.stop - piece.start for piece in self.pieces) + self.padding


def interval(shape: Sequence[int], axis: int, start: int, stop: int) -> Box:
    """The box of a tensor of `shape` that is whole but along `axis`."""
    box = Box.whole(shape)
    return Box((*box.start[:axis], start, *box.start[axis + 1 :]), (*box.stop[:axis], stop, *box.stop[axis + 1 :]))


def cut(kind: Kind, dimensions: Sequence[Sequence[Dimension]], part: int, parts: int) -> Cut:
    """Part `part` of `parts` of a parameter of `kind`, whose HuggingFace tensors have these `dimensions`.

    `undividable` must find nothing.
    """
    return _CUTS[kind](dimensions, part, parts)


def undividable(kind: Kind, dimensions: Sequence[Sequence[Dimension]], parts: int) -> Dimension | None:
    """The dimension that does not allow `parts` parts of a parameter of `kind`; None where all do."""
    if kind in (Kind.REPLICATED, Kind.VOCABULARY):
        return None
    if kind is Kind.QKV:
        return _undividable_qkv(dimensions[0][0], dimensions[1][0], parts)
    cut_dimensions = (shape[1 if kind is Kind.ROW else 0] for shape in dimensions)
    return next((dimension for dimension in cut_dimensions if dimension.units % parts), None)


def _undividable_qkv(query: Dimension, key_value: Dimension, parts: int) -> Dimension | None:
    if query.units % parts or query.units % key_value.units:
        return query
    # Several groups on a part, or several parts that share a group.
    whole_groups = key_value.units % parts == 0 or parts % key_value.units == 0
    return key_value if not whole_groups or (query.size + 2 * key_value.size) % parts else None


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
    """Query heads, key and value of each group in turn; with fewer groups than parts a cut goes through a group."""
    groups = dimensions[1][0].units
    interleaved = [
        _even(source, shape[0], group, groups) for group in range(groups) for source, shape in enumerate(dimensions)
    ]
    length = sum(shape[0].size for shape in dimensions) // parts
    return Cut(0, _between(interleaved, part * length, (part + 1) * length))


def _between(pieces: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """Cut `start` to `stop` out of pieces that follow each other."""
    inside, position = [], 0
    for piece in pieces:
        end = position + piece.stop - piece.start
        first, last = max(start, position), min(stop, end)
        if first < last:
            offset = piece.start - position
            inside.append(Piece(piece.source, first + offset, last + offset))
        position = end
    return inside


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
