"""Query, key and value of attention, cut over more or fewer ranks than there are groups; vocabularies of engines."""

import itertools

import pytest
import torch

from converters.architectures import Dimension, Kind
from converters.layouts.cuts import ENGINES, Piece, cut, undividable


def megatron_takes(heads: int, groups: int, head_dim: int, parts: int) -> bool:
    """Assertions that megatron-core's TransformerConfig, SelfAttention and ColumnParallelLinear make."""
    rows = (heads + 2 * groups) * head_dim
    return (
        heads % parts == 0 and heads % groups == 0 and (groups % parts == 0 or parts % groups == 0) and not rows % parts
    )


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 8])
def test_each_rank_has_an_even_share_of_the_interleaved_rows(parts):
    cases = list(itertools.product((4, 6, 8, 12, 24), (1, 2, 3, 4, 6), (1, 2, 3, 4)))
    assert any(megatron_takes(*case, parts) for case in cases)
    for heads, groups, head_dim in cases:
        sizes = (heads, groups, groups)
        dimensions = [[Dimension("heads", units, head_dim)] for units in sizes]
        takes = megatron_takes(heads, groups, head_dim, parts)
        assert (undividable(Kind.QKV, dimensions, parts) is None) == takes, (heads, groups, head_dim)
        if not takes:
            continue
        # Every row as (number of the tensor, row in it), put together as Megatron's own converter does.
        rows = [torch.tensor([[source, row] for row in range(units * head_dim)]) for source, units in enumerate(sizes)]
        together = torch.cat([tensor.view(groups, -1, 2) for tensor in rows], 1).flatten(0, 1)
        for part, expected in enumerate(together.chunk(parts)):
            pieces = cut(Kind.QKV, dimensions, part, parts).pieces
            got = [[piece.source, row] for piece in pieces for row in range(piece.start, piece.stop)]
            assert got == expected.tolist(), (heads, groups, head_dim, part)


def engines_take(heads: int, groups: int, parts: int) -> bool:
    """Assertions that QKVParallelLinear makes, of vLLM and of SGLang."""
    return heads % parts == 0 and (groups % parts == 0 or parts % groups == 0)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 8])
def test_each_worker_of_an_engine_has_whole_heads(parts):
    cases = list(itertools.product((4, 6, 8, 12, 24), (1, 2, 3, 4, 6), (1, 3)))
    assert any(engines_take(heads, groups, parts) for heads, groups, _ in cases)
    for heads, groups, head_dim in cases:
        dimensions = [[Dimension("heads", units, head_dim)] for units in (heads, groups, groups)]
        takes = engines_take(heads, groups, parts)
        assert (undividable(Kind.QKV, dimensions, parts, ENGINES) is None) == takes, (heads, groups)
        if not takes:
            continue
        sizes = [heads // parts, *[max(1, groups // parts)] * 2]
        for part in range(parts):
            # As these loaders do: the first row is that of the worker's number, or of that which shares its head.
            numbers = [part, *[part // max(1, parts // groups)] * 2]
            expected = [
                Piece(source, number * size * head_dim, (number + 1) * size * head_dim)
                for source, (number, size) in enumerate(zip(numbers, sizes, strict=True))
            ]
            assert list(cut(Kind.QKV, dimensions, part, parts, ENGINES).pieces) == expected, (heads, groups, part)


def test_a_matrix_is_divided_by_the_dimension_that_its_kind_cuts():
    rows, columns = Dimension("rows", 4), Dimension("columns", 6)
    takes = {Kind.COLUMN: (2, 4), Kind.ROW: (2, 3, 6), Kind.REPLICATED: (2, 3, 4, 6)}
    for kind, taken in takes.items():
        wrong = {parts: undividable(kind, [[rows, columns]], parts) for parts in (2, 3, 4, 6)}
        assert wrong == {parts: None if parts in taken else columns if kind is Kind.ROW else rows for parts in wrong}


@pytest.mark.parametrize(
    ("size", "parts", "rows"),
    [(100, 1, 128), (100, 2, 64), (129, 2, 96), (129, 4, 48), (64, 8, 8), (65, 3, 64), (151936, 8, 18992)],
)
def test_the_vocabulary_of_an_engine_is_filled_up_as_it_fills_it_up(size, parts, rows):
    """Filled up to a multiple of 64 or, where workers do not share that out evenly, of 64 for each of them."""
    start = 0
    for part in range(parts):
        found = cut(Kind.VOCABULARY, [[Dimension("vocab_size", size, 1)]], part, parts, ENGINES)
        assert found.length == rows
        stop = min(start + rows, size)
        assert list(found.pieces) == ([Piece(0, start, stop)] if start < stop else [])
        start = stop
    assert start == size
