"""Packed attention against one attention per sequence, written out."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_ext import device

device.install()
from megatron_ext.attention.attention import packed_causal_attention  # noqa: E402 (after the device layer)

SCALE = 0.37


def attend_one_by_one(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Softmax of masked scores, sequence by sequence and head by head."""
    heads_per_group = query.shape[1] // key.shape[1]
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        heads = []
        for head in range(query.shape[1]):
            group = head // heads_per_group
            scores = (q[:, head] @ k[:, group].T * SCALE).masked_fill(future, -math.inf)
            heads.append(scores.softmax(-1) @ v[:, group])
        outputs.append(torch.stack(heads, 1))
    return torch.cat(outputs)


def random_inputs(
    lengths: list[int], heads: int, groups: int, k_width: int, v_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = ((heads, k_width), (groups, k_width), (groups, v_width))
    query, key, value = (
        torch.randn(sum(lengths), *shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    )
    return query, key, value


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=12).filter(any),
    st.sampled_from([(4, 4, 8, 8), (4, 2, 8, 8), (4, 1, 8, 6), (2, 2, 12, 4)]),
)
def test_values_and_gradients(lengths: list[int], widths: tuple[int, int, int, int]) -> None:
    check(lengths, widths)


@pytest.mark.parametrize("widths", [(4, 2, 8, 8), (2, 2, 12, 4)])
def test_long_sequences_beside_short_ones(widths: tuple[int, int, int, int]) -> None:
    check([3, 200, 129, 1, 128, 127, 530, 0, 515], widths)


def check(lengths: list[int], widths: tuple[int, int, int, int]) -> None:
    inputs = random_inputs(lengths, *widths)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    got = packed_causal_attention(*inputs, cu_seqlens, softmax_scale=SCALE)
    expected = attend_one_by_one(*inputs, lengths)
    torch.testing.assert_close(got, expected)
    upstream = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view_as(got)
    got_gradients = torch.autograd.grad(got, inputs, upstream)
    expected_gradients = torch.autograd.grad(expected, inputs, upstream)
    for got_gradient, expected_gradient in zip(got_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got_gradient, expected_gradient)


def test_tokens_outside_the_sequences_are_refused() -> None:
    inputs = random_inputs([5, 4], 2, 2, 4, 4)
    with pytest.raises(ValueError, match="ends at 8"):
        packed_causal_attention(*inputs, torch.tensor([0, 5, 8]), softmax_scale=SCALE)


def test_number_of_kernels_does_not_grow_with_the_number_of_sequences() -> None:
    def kernels(sequences: int) -> tuple[int, int]:
        lengths = [5 + index % 20 for index in range(sequences)]
        inputs = random_inputs(lengths, 2, 2, 4, 4)
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            packed_causal_attention(*inputs, cu_seqlens, softmax_scale=SCALE)
        counts = {event.key: event.count for event in profile.key_averages()}
        return counts["aten::softmax"], sum(counts.values())

    few, many = kernels(40), kernels(400)
    assert few == many
    assert many[0] == 3  # sequences of up to 8, up to 16 and up to 24 tokens


def test_long_sequences_of_any_length_are_neither_padded_nor_copied_to_a_batch() -> None:
    lengths = [100, 101, 67, 64, 0, 103]
    inputs = random_inputs(lengths, 2, 1, 4, 4)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        packed_causal_attention(*inputs, cu_seqlens, softmax_scale=SCALE)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::softmax"] == 5
    assert "aten::index" not in counts


def test_memory_is_linear_in_the_length() -> None:
    length = 8192
    inputs = [tensor.detach().float() for tensor in random_inputs([length], 2, 1, 16, 8)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        packed_causal_attention(*inputs, torch.tensor([0, length]), softmax_scale=SCALE)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < length * length  # one score matrix of bytes; the scores of one head would take four times this
