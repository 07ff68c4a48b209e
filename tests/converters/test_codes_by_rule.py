"""INT8 per channel, MXFP8 and NVFP4 against plain implementations of the published rules, which share no code."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_fp8 import VALUES, reference_codes

from converters.number_formats import INT8_CHANNEL, MXFP8, NUMBER_FORMATS, NVFP4

BF16, FP32 = torch.bfloat16, torch.float32
LARGEST = float(torch.finfo(FP32).max)


@st.composite
def weights(draw):
    """Matrices of whole blocks of 32 columns, with values of very different sizes and of special ones."""
    shape = draw(st.integers(1, 5)), 32 * draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    exponents = torch.randn(shape, generator=generator) * draw(st.sampled_from((0.0, 1.0, 8.0)))
    weight = torch.randn(shape, generator=generator) * torch.exp2(exponents + draw(st.integers(-149, 120)))
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 448.0, 449.0, 464.0, 511.9, -LARGEST, 1e-10])
    where = torch.rand(shape, generator=generator) < draw(st.sampled_from((0.0, 0.02, 1.0)))
    weight[where] = special[torch.randint(len(special), (int(where.sum()),), generator=generator)]
    return weight.to(draw(st.sampled_from((BF16, FP32)))).nan_to_num(posinf=0.0, neginf=0.0)


@settings(max_examples=60, deadline=None)
@given(weights().map(lambda weight: weight.clamp(-(2.0**127), 2.0**127)))
@example(torch.full((2, 32), 2.0**127))
@example(torch.zeros(1, 64))
def test_int8_is_symmetric_quantisation_of_each_row(weight):
    codes, scales = INT8_CHANNEL.quantise(weight)
    assert (codes.dtype, tuple(codes.shape)) == (torch.int8, tuple(weight.shape))
    assert (scales.dtype, tuple(scales.shape)) == (FP32, (weight.shape[0], 1))
    values = weight.to(FP32).numpy()
    expected = np.maximum(np.abs(values).max(1, keepdims=True), np.float32(1e-10)) / np.float32(127)
    assert np.array_equal(scales.numpy(), expected)
    # The quotient is rounded to float32 first; to even in a tie.
    quotients = (values / expected).astype(np.float64)
    assert np.array_equal(codes.numpy(), [[round(each) for each in row] for row in quotients])
    # No row is clipped, and none uses -128.
    assert codes.abs().max() <= 127
    decoded = INT8_CHANNEL.dequantise(codes, scales, FP32).to(torch.float64)
    assert ((decoded - weight.to(torch.float64)).abs() <= scales.to(torch.float64) * (0.5 + 1e-4)).all()


@settings(max_examples=60, deadline=None)
@given(weights())
@example(torch.full((2, 32), LARGEST))
@example(torch.zeros(1, 64))
@example(torch.full((1, 32), 1e-45))
def test_mxfp8_is_the_conversion_of_the_ocp_specification(weight):
    codes, scales = MXFP8.quantise(weight)
    assert (codes.dtype, tuple(codes.shape)) == (torch.float8_e4m3fn, tuple(weight.shape))
    assert (scales.dtype, tuple(scales.shape)) == (torch.uint8, (weight.shape[0], weight.shape[1] // 32))
    blocks = weight.to(torch.float64).numpy().reshape(-1, 32)
    for block, own, scale in zip(
        blocks, codes.view(torch.uint8).numpy().reshape(-1, 32), scales.flatten(), strict=True
    ):
        largest = np.abs(block).max()
        # E8M0 has exponents from -127 to 127; a float32 has none whose scale lies above.
        exponent = max(math.frexp(largest)[1] - 1 - 8, -127) if largest else -127
        assert int(scale) == exponent + 127
        scaled = np.clip(block / 2.0**exponent, -448, 448)
        assert np.array_equal(own, reference_codes(scaled))


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def reference_e2m1(number: float) -> int:
    """The nearest code of four bits, an even one in a tie."""
    distances = np.abs(E2M1 - abs(number))
    nearest = [code for code in range(8) if distances[code] == distances.min()]
    code = next((code for code in nearest if code % 2 == 0), nearest[0])
    return code | 8 if number < 0 and code else code


@settings(max_examples=40, deadline=None)
@given(weights().map(lambda weight: weight.clamp(-10.5, 10.5)))
@example(torch.full((2, 32), 10.5))
@example(torch.zeros(1, 64))
@example(
    torch.tensor([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6.0]]) / 256
)
def test_nvfp4_is_the_published_rule_for_its_global_scale(weight):
    codes, scales = NVFP4.quantise(weight)
    assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (weight.shape[0], weight.shape[1] // 2))
    assert (scales.dtype, tuple(scales.shape)) == (torch.float8_e4m3fn, (weight.shape[0], weight.shape[1] // 16))
    blocks, pairs = weight.to(FP32).numpy().reshape(-1, 16), codes.numpy().reshape(-1, 8)
    factors = VALUES[scales.view(torch.uint8).numpy().flatten()]
    for block, own, scale in zip(blocks, pairs, factors, strict=True):
        # A sixth is rounded to float32, and so are the products.
        largest = np.abs(block).max() * np.float32(1 / 6) * np.float32(256)
        assert scale == VALUES[reference_codes(np.array([largest]))[0]]
        factor = np.float32(256 / scale) if scale else np.float32(0)
        assert [each for pair in own.tolist() for each in (pair & 15, pair >> 4)] == [
            reference_e2m1(float(each * factor)) for each in block
        ]
    each = np.stack([pairs & 15, pairs >> 4], 2).reshape(-1, 16)
    values = np.where(each & 8, -1, 1) * E2M1[each & 7] * factors[:, None] / 256
    assert np.array_equal(NVFP4.dequantise(codes, scales, FP32).numpy().reshape(-1, 16), values.astype(np.float32))


def test_one_global_scale_for_all_tensors_is_as_precise_as_one_of_the_largest_weight():
    generator = torch.Generator().manual_seed(1)
    for size in (0.002, 0.02, 0.5):
        weight = size * torch.randn(64, 512, generator=generator)
        # With weights so large that its global scale is that of the recipe.
        ratio = 0.9999 * 10.5 / float(weight.abs().max())
        found, recipe = (NVFP4.dequantise(*NVFP4.quantise(weight * each), FP32) / each for each in (1, ratio))
        errors = [float((each - weight).norm() / weight.norm()) for each in (found, recipe)]
        assert errors[0] == pytest.approx(errors[1], rel=0.02)


def test_every_code_and_scale_is_decoded_to_its_value():
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    codes = codes.view(torch.float8_e4m3fn).reshape(8, 32)
    for scale in (0, 1, 118, 127, 246):
        decoded = MXFP8.dequantise(codes, torch.full((8, 1), scale, dtype=torch.uint8), FP32).flatten()
        expected = torch.from_numpy(VALUES * 2.0 ** (scale - 127)).to(FP32)
        assert torch.equal(decoded, expected.nan_to_num(0.0))
    rows = torch.arange(-128, 128).to(torch.int8).reshape(2, 128)
    decoded = INT8_CHANNEL.dequantise(rows, torch.tensor([[0.5], [3.0]]), BF16)
    assert torch.equal(
        decoded, torch.cat([torch.arange(-128, 0) * 0.5, torch.arange(0, 128) * 3.0]).view(2, 128).to(BF16)
    )


@pytest.mark.parametrize("number_format", [INT8_CHANNEL, MXFP8], ids=lambda each: each.name)
def test_a_part_of_whole_blocks_has_the_bits_of_the_whole(number_format):
    weight = torch.randn(2100, 1024).to(BF16)
    codes, scales = number_format.quantise(weight)
    rows, columns = slice(300, 2050), slice(0, 1024) if number_format is INT8_CHANNEL else slice(96, 608)
    blocks = slice(0, 1) if number_format is INT8_CHANNEL else slice(3, 19)
    own_codes, own_scales = number_format.quantise(weight.t().contiguous().t()[rows, columns])
    assert torch.equal(own_codes.view(torch.uint8), codes[rows, columns].contiguous().view(torch.uint8))
    assert torch.equal(own_scales, scales[rows, blocks])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("number_format", "says"),
    [
        (INT8_CHANNEL, "row 1500 holds a weight that is NaN, infinite or too large"),
        (MXFP8, "block 1500, 2 holds a weight that is NaN or infinite"),
        (NVFP4, "block 1500, 4 holds a weight that is NaN, infinite or above 10.5"),
    ],
)
def test_a_weight_that_has_no_code_is_named(number_format, says, value):
    weight = torch.ones(1501, 1024, dtype=BF16)
    weight[1500, 64] = value
    with pytest.raises(ValueError, match=says):
        number_format.quantise(weight)


def test_columns_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="40 columns is not made of blocks of 16"):
        NVFP4.quantise(torch.ones(1, 40))
    with pytest.raises(ValueError, match="40 columns is not made of blocks of 32"):
        MXFP8.quantise(torch.ones(1, 40))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("fp8_block", 0.0264),
        ("fp8_block_ue8m0", 0.0264),
        ("int8_channel", 0.0083),
        ("mxfp8", 0.0293),
        ("nvfp4", 0.0952),
    ],
)
def test_the_error_of_a_round_trip_is_the_documented_one(name, error):
    number_format = NUMBER_FORMATS[name]
    weight = 0.02 * torch.randn(512, 2048, generator=torch.Generator().manual_seed(0))
    decoded = number_format.dequantise(*number_format.quantise(weight), FP32)
    assert (decoded - weight).norm() / weight.norm() == pytest.approx(error, rel=0.02)
