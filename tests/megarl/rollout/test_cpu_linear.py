"""Bits of products on this CPU: how many rows they need so as not to depend on how many there are."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.rollout import cpu_linear
from megatron_ext import device

WIDTHS = st.sampled_from([8, 16, 24, 48, 64, 96, 100, 128, 192, 256, 384, 512, 1024])
MOST = 150
"""Rows of the largest batch."""


@pytest.fixture(autouse=True, scope="module")
def _as_in_an_engine():
    device.multiply_by_onednn()


def same_bits(linear, width, outputs, first, rows, dtype, bias=False):
    """Whether rows `first` on have the bits that they have among `MOST`."""
    generator = torch.Generator().manual_seed(width * outputs)
    x, weight, offset = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((MOST, width), (outputs, width), (outputs,))
    )
    part = slice(first, first + rows)
    given_bias = offset if bias else None
    return torch.equal(linear(x[part], weight, given_bias), linear(x, weight, given_bias)[part])


@settings(max_examples=150)
@given(
    width=WIDTHS,
    outputs=WIDTHS,
    first=st.integers(0, 50),
    rows=st.integers(1, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
)
@example(width=1024, outputs=512, first=3, rows=1, dtype=torch.float32, bias=False)
@example(width=1024, outputs=512, first=3, rows=cpu_linear.ROWS - 1, dtype=torch.float32, bias=False)
@example(width=1024, outputs=512, first=3, rows=cpu_linear.ROWS, dtype=torch.float32, bias=False)
def test_a_row_has_the_same_bits_whatever_other_rows_there_are(width, outputs, first, rows, dtype, bias):
    assert same_bits(cpu_linear.linear, width, outputs, first, rows, dtype, bias), (
        f"cpu_linear.ROWS is {cpu_linear.ROWS}, and this CPU needs more"
    )


def test_torch_alone_gives_a_few_rows_other_bits():
    widths = 64, 256, 1024
    found = [same_bits(F.linear, width, outputs, 3, 1, torch.float32) for width in widths for outputs in widths]
    assert not all(found)


@given(shape=st.lists(st.integers(0, 5), max_size=2), bias=st.booleans())
def test_products_of_any_shape(shape, bias):
    x, weight = torch.randn(*shape, 48), torch.randn(24, 48)
    offset = torch.randn(24) if bias else None
    torch.testing.assert_close(cpu_linear.linear(x, weight, offset), F.linear(x, weight, offset))
