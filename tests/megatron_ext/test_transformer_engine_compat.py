"""Tensors without elements do not reach kernels for lists of tensors, which lose their place at one."""

from typing import Any

import pytest
import torch
from played_fused_adam import CHUNK, MOST_TENSORS, MultiTensorApply, beside_fused_adam, launched
from torch import Tensor

from megatron_ext.transformer_engine_compat import leave_out_empty_tensors

MANY = [1] * (MOST_TENSORS[2] - 1)
ALL_LOST, ONE_LOST = [3, 2 * CHUNK + 1, 0], [*MANY, 1, 5, 0]
BEHIND_THE_TABLE = [*MANY, 0, 1]


def lists_of(sizes: list[int]) -> list[list[Tensor]]:
    """Two lists, in which values say where a tensor is."""
    return [[torch.full((size,), 1000.0 * number + place) for place, size in enumerate(sizes)] for number in range(2)]


def parts(sizes: list[int]) -> set[tuple[int, int]]:
    """Chunks that have to be launched."""
    return {(place, chunk) for place, size in enumerate(sizes) for chunk in range(-(-size // CHUNK))}


def given_to_kernel(sizes: list[int]) -> list[list[Tensor]]:
    def kernel(chunk_size: int, _skip: Tensor, own: list[list[Tensor]], *arguments: Any) -> list[list[Tensor]]:
        assert (chunk_size, *arguments) == (CHUNK, "a", 2)
        return own

    with beside_fused_adam():
        for _ in range(2):
            leave_out_empty_tensors()
        return MultiTensorApply(CHUNK)(kernel, torch.zeros(1), lists_of(sizes), "a", 2)


def test_what_kernels_make_of_tensors_without_elements() -> None:
    """Goes, with the workaround, when Transformer Engine 2.18 is the oldest that is supported."""
    assert launched(lists_of([0, 3, 0, 2]), CHUNK) == parts([0, 3, 0, 2])
    assert launched(lists_of(ALL_LOST), CHUNK) == set()
    assert launched(lists_of(ONE_LOST), CHUNK) == parts(ONE_LOST) - {(len(MANY) + 1, 0)}
    with pytest.raises(IndexError, match="behind a table of 64"):
        launched(lists_of(BEHIND_THE_TABLE), CHUNK)


@pytest.mark.parametrize("sizes", [ALL_LOST, ONE_LOST, BEHIND_THE_TABLE, [0, 3, 0, 2], [4, 5]])
def test_kernels_get_the_other_tensors_in_their_order(sizes: list[int]) -> None:
    given = given_to_kernel(sizes)
    expected = [[tensor for tensor in tensors if tensor.numel()] for tensors in lists_of(sizes)]
    for got, wanted in zip(given, expected, strict=True):
        assert len(got) == len(wanted)
        assert all(map(torch.equal, got, wanted))
    assert launched(given, CHUNK) == parts([size for size in sizes if size])


def test_a_kernel_that_has_nothing_to_do_gets_a_tensor_for_its_type() -> None:
    assert [len(tensors) for tensors in given_to_kernel([0, 0, 0])] == [1, 1]
    assert given_to_kernel([]) == [[], []]
