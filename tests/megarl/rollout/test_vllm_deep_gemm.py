"""Block FP8 with powers of two beside vLLM's own functions for DeepGEMM: what they quantise and requantise."""

import pytest
import torch
from engine_host import vllm_pool

from converters.fp8 import LARGEST_WEIGHT
from converters.number_formats import FP8_BLOCK, FP8_BLOCK_UE8M0

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def in_vllm():
    """Calls a function in a process that has vLLM."""
    with vllm_pool() as process:
        yield lambda function, *arguments: process.apply(function, arguments)


def weights(dtype):
    """Blocks of magnitudes from far below the smallest that counts to 1e30, one of zeros, and parts of blocks."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(4 * 128 + 60, 5 * 128 + 20, generator=generator)
    sizes = torch.logspace(-12, 30, 30).view(5, 6)
    sizes[0, 0] = 0.0
    weight *= spread(sizes)[: weight.shape[0], : weight.shape[1]]
    # Its largest is rounded to 224, half of the largest code, and others to subnormal codes.
    weight[:128, 128:256] = torch.logspace(-6, 0, 128) * 227
    return weight.to(dtype)


def spread(blocks):
    return blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)


def same_bits(one, other):
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (one, other)))


def _quantised_by_vllm(weight, rows=128):
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    with torch.compiler.set_stance("force_eager"):
        return per_block_cast_to_fp8(weight, [rows, 128], use_ue8m0=True)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_codes_and_scales_are_those_that_vllm_makes_and_loads(in_vllm, dtype):
    weight = weights(dtype)
    codes, scales = FP8_BLOCK_UE8M0.quantise(weight)
    made = in_vllm(_quantised_by_vllm, weight)
    loaded = in_vllm(_requantised_by_vllm, *(part.clone() for part in made))
    assert same_bits(codes, loaded[0])
    assert same_bits(scales, loaded[1])
    # One of the blocks is such that loading changes its bits, and none of its values.
    assert not same_bits(made[1], loaded[1])
    assert torch.equal(FP8_BLOCK_UE8M0.dequantise(*made, FP32), FP8_BLOCK_UE8M0.dequantise(*loaded, FP32))
    assert torch.equal(scales.to(torch.float8_e8m0fnu).to(FP32), scales)


def test_every_magnitude_in_bfloat16_is_that_of_vllm(in_vllm):
    # By a logarithm in float32 it finds the next power of two, which is wrong just above one.
    magnitudes = torch.arange(0x7F80, dtype=torch.int16).view(BF16)
    magnitudes = magnitudes[magnitudes <= LARGEST_WEIGHT]
    # A block for each, with a row alone, and 128 columns: vLLM would fill up the other rows.
    weight = torch.zeros(1, 128 * len(magnitudes), dtype=BF16)
    weight[0, ::128] = magnitudes
    codes, scales = FP8_BLOCK_UE8M0.quantise(weight)
    made = in_vllm(_quantised_by_vllm, weight, 1)
    assert torch.equal(FP8_BLOCK_UE8M0.dequantise(codes, scales, FP32), FP8_BLOCK_UE8M0.dequantise(*made, FP32))
    assert ((scales == made[1]) | (2 * scales == made[1])).all()


def _requantised_by_vllm(codes, scales):
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace

    with torch.compiler.set_stance("force_eager"):
        requant_weight_ue8m0_inplace(codes, scales)
    return codes, scales


def test_vllm_loads_them_as_they_are(in_vllm):
    weight = weights(BF16)
    codes, scales = FP8_BLOCK_UE8M0.quantise(weight)
    again = in_vllm(_requantised_by_vllm, codes.clone(), scales.clone())
    assert same_bits(codes, again[0])
    assert same_bits(scales, again[1])
    # The codes of block FP8 are rounded a second time.
    codes, scales = FP8_BLOCK.quantise(weight)
    again = in_vllm(_requantised_by_vllm, codes.clone(), scales.clone())
    assert not torch.equal(FP8_BLOCK.dequantise(codes, scales, FP32), FP8_BLOCK.dequantise(*again, FP32))
