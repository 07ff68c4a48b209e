"""Assembles each kind of parameter from HuggingFace tensors and cuts it over the ranks of Megatron or an engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from converters.architectures import Dimension, Kind
from converters.boxes import Box


@dataclass(frozen=True)
class Piece:
    """Rows or columns `start` to `stop`, along the cut's axis, of a parameter's HuggingFace tensor number `source`."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True)
class Cut:
    """A rank's part of a parameter: pieces concatenated along `axis`, then padding."""

    axis: int
    pieces: Sequence[Piece]
    padding: int = 0

    @property
    def length(self) -> int:
        """Length of the rank's tensor along `axis`."""
        return sum(piece.stop - piece.start for piece in self.pieces) + self.padding


def interval(shape: Sequence[int], axis: int, start: int, stop: int) -> Box:
    """The box of a tensor of `shape` that is cut along `axis` only."""
    box = Box.whole(shape)
    return Box((*box.start[:axis], start, *box.start[axis + 1 :]), (*box.stop[:axis], stop, *box.stop[axis + 1 :]))


def _undividable_qkv(query: Dimension, key_value: Dimension, parts: int) -> Dimension | None:
    if query.units % parts or query.units % key_value.units:
        return query
    rows = query.size + 2 * key_value.size
    return key_value if not _whole_groups(key_value, parts) or rows % parts else None


def _undividable_heads(query: Dimension, key_value: Dimension, parts: int) -> Dimension | None:
    if query.units % parts:
        return query
    return None if _whole_groups(key_value, parts) else key_value


def _whole_groups(key_value: Dimension, parts: int) -> bool:
    """Whether each part has whole groups, or each group is shared by a whole number of parts."""
    return key_value.units % parts == 0 or parts % key_value.units == 0


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
    """Query heads, key and value of each group in turn; with fewer groups than parts, groups are cut."""
    groups = dimensions[1][0].units
    interleaved = [
        _even(source, shape[0], group, groups) for group in range(groups) for source, shape in enumerate(dimensions)
    ]
    length = sum(shape[0].size for shape in dimensions) // parts
    return Cut(0, _between(interleaved, part * length, (part + 1) * length))


def _whole_heads(dimensions: Sequence[Sequence[Dimension]], part: int, parts: int) -> Cut:
    """The part's query heads, then its keys, then its values; with fewer key-value heads than parts, one of each."""
    sharing = max(1, parts // dimensions[1][0].units)
    queries, *others = (shape[0] for shape in dimensions)
    keys_and_values = [
        _even(source, each, part // sharing, parts // sharing) for source, each in enumerate(others, start=1)
    ]
    return Cut(0, [_even(0, queries, part, parts), *keys_and_values])


def _between(pieces: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """Cut `start` to `stop` out of concatenated pieces."""
    inside, position = [], 0
    for piece in pieces:
        end = position + piece.stop - piece.start
        first, last = max(start, position), min(stop, end)
        if first < last:
            offset = piece.start - position
            inside.append(Piece(piece.source, first + offset, last + offset))
        position = end
    return inside


def _vocabulary(multiple: int, dimensions: Sequence[Sequence[Dimension]], part: int, parts: int) -> Cut:
    """Rows of a vocabulary padded to `multiple`, or to `multiple * parts` if the parts cannot be equal otherwise."""
    size = dimensions[0][0].size
    rows = _filled_up(size, multiple)
    length = (rows if rows % parts == 0 else _filled_up(size, multiple * parts)) // parts
    start, stop = min(part * length, size), min((part + 1) * length, size)
    return Cut(0, [Piece(0, start, stop)] if start < stop else [], padding=length - (stop - start))


def _filled_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class CutRules:
    """How a program cuts a model over ranks."""

    cuts: Mapping[Kind, Callable[[Sequence[Sequence[Dimension]], int, int], Cut]]
    """Kind of parameter -> its cut."""
    undividable_qkv: Callable[[Dimension, Dimension, int], Dimension | None]
    """Returns the heads, of queries or of keys and values, that cannot be cut into this many parts; None if all can."""


_ALIKE = {Kind.REPLICATED: _replicated, Kind.COLUMN: _column, Kind.ROW: _row, Kind.GATED: _gated}
MEGATRON = CutRules({**_ALIKE, Kind.QKV: _qkv, Kind.VOCABULARY: partial(_vocabulary, 1)}, _undividable_qkv)
ENGINES = CutRules({**_ALIKE, Kind.QKV: _whole_heads, Kind.VOCABULARY: partial(_vocabulary, 64)}, _undividable_heads)
"""The rules of vLLM and SGLang, from their QKVParallelLinear and VocabParallelEmbedding.

If workers cannot share a vocabulary evenly with this padding, SGLang pads further, and vLLM does not start.
"""


def cut(
    kind: Kind, dimensions: Sequence[Sequence[Dimension]], part: int, parts: int, rules: CutRules = MEGATRON
) -> Cut:
    """Cut part `part` of `parts` out of a parameter of `kind`, whose HuggingFace tensors have these `dimensions`.

    The caller has checked that `undividable` returns None.
    """
    return rules.cuts[kind](dimensions, part, parts)


def undividable(
    kind: Kind, dimensions: Sequence[Sequence[Dimension]], parts: int, rules: CutRules = MEGATRON
) -> Dimension | None:
    """The dimension that prevents cutting a parameter of `kind` into `parts` parts; None if there is none."""
    if kind in (Kind.REPLICATED, Kind.VOCABULARY):
        return None
    if kind is Kind.QKV:
        return rules.undividable_qkv(dimensions[0][0], dimensions[1][0], parts)
    cut_dimensions = (shape[1 if kind is Kind.ROW else 0] for shape in dimensions)
    return next((dimension for dimension in cut_dimensions if dimension.units % parts), None)
