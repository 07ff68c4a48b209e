"""Kernels of a refit on a GPU: the bytes of the host, and the checksum of its formula."""

import pytest
import torch
from gpus import needs_gpus, needs_package
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Matrix, block, boxes, counted, elsewhere, in_all, in_block_fp8, in_int8, in_mxfp8, weighted_sum

from converters.number_formats import FP8_BLOCK, FP8_BLOCK_UE8M0
from megarl.resharding.kernels import gather, scatter

pytestmark = [pytest.mark.cuda, needs_gpus(1), needs_package("triton")]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(boxes(), max_size=6), st.lists(in_block_fp8 | in_mxfp8 | in_int8, max_size=2), st.integers(0, 2**32 - 1)
)
def test_a_gpu_makes_the_bytes_of_the_host(copied, quantised, seed):
    on_gpu, on_host = (block(copied, quantised, seed, device) for device in ("cuda", "cpu"))
    assert gather(on_gpu, seed) == weighted_sum(on_gpu, seed)
    gather(on_host, None)
    assert torch.equal(counted(on_gpu).cpu(), counted(on_host))

    on_gpu, on_host = elsewhere(on_gpu), elsewhere(on_host)
    assert scatter(on_gpu, seed) == weighted_sum(on_gpu, seed)
    scatter(on_host, None)
    for one, other in zip(in_all(on_gpu), in_all(on_host), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("number_format", [FP8_BLOCK, FP8_BLOCK_UE8M0], ids=lambda each: each.name)
def test_every_mantissa_over_every_scale(number_format):
    found = [
        block([], [Matrix((128, 128 * 128), torch.bfloat16, 0, number_format, 0.0)], 0, at) for at in ("cuda", "cpu")
    ]
    magnitudes = torch.arange(128, 256) * 2.0 ** -torch.arange(20)[:, None]
    for largest, of_block in zip(range(128, 256), found[1].quantised[0].local.split(128, 1), strict=True):
        values = magnitudes[magnitudes <= largest]
        values = torch.cat([values, -values])
        of_block.copy_(torch.nn.functional.pad(values, (0, 128 * 128 - len(values))).view(128, 128))
    found[0].quantised[0].local.copy_(found[1].quantised[0].local)
    for each in found:
        gather(each, None)
    assert torch.equal(counted(found[0]).cpu(), counted(found[1]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_fp8_cannot_hold_is_named_with_its_block(value):
    found = block([], [Matrix((130, 136), torch.bfloat16, 1, FP8_BLOCK, 1.0)] * 2, device="cuda")
    found.quantised[1].local[129, 130] = value
    with pytest.raises(ValueError, match="matrix 1: block 1, 1 holds a weight that is NaN"):
        gather(found, 0)
