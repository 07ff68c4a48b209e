"""Query, key and value of attention, cut over more or fewer ranks than there are groups, against plain torch."""

import itertools

import pytest
import torch

from converters.architectures import Dimension, Kind
from converters.layouts.cuts import cut, undividable


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
