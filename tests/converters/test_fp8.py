"""Block FP8 against plain float64 implementations of the published rule, which share nothing with the code."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from converters.fp8 import LARGEST_WEIGHT, dequantise_into, quantise_into, scales_shape
from converters.fp8.blocks import tiles
from converters.number_formats import FP8_BLOCK, FP8_BLOCK_UE8M0

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
NAN_CODES = (0x7F, 0xFF)
CODE_OF_224 = 0x76


def value_of(code: int) -> float:
    """OCP 8-bit floating point specification, E4M3: bias 7, no infinity, one NaN of either sign."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 7
    if exponent == 0xF and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


VALUES = np.array([value_of(code) for code in range(256)])


def reference_codes(quotients: np.ndarray) -> np.ndarray:
    """The nearest code, an even one in a tie, found by searching the table of values."""
    values, magnitudes = VALUES[:0x7F], np.abs(quotients).astype(np.float64)
    upper = np.clip(np.searchsorted(values, magnitudes), 1, 0x7E)
    above, below = values[upper] - magnitudes, magnitudes - values[upper - 1]
    nearest = np.where((above < below) | ((above == below) & (upper % 2 == 0)), upper, upper - 1)
    return (nearest | np.where(np.signbit(quotients), 0x80, 0)).astype(np.uint8)


def blocks_of(matrix: np.ndarray):
    for row in range(0, matrix.shape[0], 128):
        for column in range(0, matrix.shape[1], 128):
            yield (row // 128, column // 128), (slice(row, row + 128), slice(column, column + 128))


def reference_quantise(weight: torch.Tensor, *, power_of_two: bool = False) -> tuple[np.ndarray, np.ndarray]:
    matrix = weight.to(FP32).numpy()
    codes = np.empty(matrix.shape, np.uint8)
    scales = np.empty([-(-n // 128) for n in matrix.shape], np.float32)
    for index, block in blocks_of(matrix):
        smallest = np.float32(1e-4 if power_of_two else 1e-10)
        scales[index] = np.maximum(np.abs(matrix[block]).max(), smallest) / np.float32(448)
        if power_of_two:
            scales[index] = 2.0 ** np.ceil(np.log2(np.float64(scales[index])))
        codes[block] = reference_codes(matrix[block] / scales[index])
        if power_of_two and (codes[block] & 0x7F).max() == CODE_OF_224 and scales[index] > 2.0**-22:
            scales[index] /= 2
            codes[block] = reference_codes(2 * VALUES[codes[block]])
    return codes, scales


def to_bfloat16_bits(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def reference_dequantise(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """In float32: the exact product, which has 28 bits, rounded once."""
    products = VALUES[codes.view(torch.uint8).numpy()]
    for index, block in blocks_of(products):
        products[block] *= float(scales[index])
    return products.astype(np.float32)


def same_bits(tensor: torch.Tensor, expected: np.ndarray) -> bool:
    return bool(np.array_equal(tensor.reshape(-1).clone().view(torch.uint8).numpy(), expected.ravel().view(np.uint8)))


def random_weight(seed: int, shape: tuple[int, int], dtype: torch.dtype, exponent: int = -5) -> torch.Tensor:
    """Values of very different sizes, with zeros and both signs of them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 4)
    weight[torch.rand(shape, generator=generator) < 0.05] = 0.0
    weight[torch.rand(shape, generator=generator) < 0.05] = -0.0
    return (weight * 2.0**exponent).to(dtype)


def random_codes(seed: int, shape: tuple[int, int]) -> torch.Tensor:
    codes = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    codes[np.isin(codes, NAN_CODES)] = 0x7E
    return torch.from_numpy(codes).view(FP8)


def random_scales(seed: int, shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = scales_shape(shape)
    return torch.rand(sizes, generator=generator) * torch.exp2(torch.randint(-140, 119, sizes, generator=generator))


SEEDS = st.integers(0, 2**31)
SIDES = st.integers(1, 400)
SHAPES = st.tuples(SIDES, SIDES)


@pytest.mark.parametrize("power_of_two", [False, True])
@given(seed=SEEDS, shape=SHAPES, dtype=st.sampled_from([BF16, FP32]), exponent=st.integers(-60, 60))
@example(seed=1, shape=(140, 8400), dtype=BF16, exponent=0)
@settings(max_examples=20, deadline=None)
def test_quantising_follows_the_published_rule_bit_for_bit(power_of_two, seed, shape, dtype, exponent):
    weight = random_weight(seed, shape, dtype, exponent)
    codes, scales = (FP8_BLOCK_UE8M0 if power_of_two else FP8_BLOCK).quantise(weight)
    expected_codes, expected_scales = reference_quantise(weight, power_of_two=power_of_two)
    assert same_bits(codes, expected_codes)
    assert same_bits(scales, expected_scales)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_weight_is_rounded_to_the_nearest_code_and_to_the_even_one_in_a_tie(dtype):
    # The scale is 1 where the largest weight is 448, so each of these is rounded as it is.
    magnitudes = torch.arange(0x43E1, dtype=torch.int16).view(BF16).to(FP32)
    middles = torch.from_numpy((VALUES[:0x7E] + VALUES[1:0x7F]) / 2).to(FP32)
    beside = [torch.nextafter(middles, torch.tensor(limit)) for limit in (0.0, 448.0)]
    values = torch.cat([magnitudes, middles, *beside])
    values = torch.cat([values, -values]).to(dtype)
    weight = torch.zeros(128, 384, dtype=dtype)
    weight.view(-1)[: len(values)] = values
    weight[0, ::128] = 448
    codes, scales = FP8_BLOCK.quantise(weight)
    assert torch.equal(scales, torch.ones(1, 3))
    assert same_bits(codes, reference_codes(weight.to(FP32).numpy()))
    assert set(codes.view(torch.uint8).unique().tolist()) == set(range(256)) - set(NAN_CODES)


def test_the_largest_weight_of_a_block_becomes_448_whatever_it_is():
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-32, 127, (3000,), generator=generator)
    largest = (1 + torch.rand(3000, generator=generator)) * torch.exp2(powers)
    largest[0], largest[1] = 1e-10, LARGEST_WEIGHT
    weight = torch.zeros(1, 3000 * 128)
    weight[0, ::128] = largest
    codes, scales = FP8_BLOCK.quantise(weight)
    assert (codes.view(torch.uint8)[0, ::128] == 0x7E).all()
    assert torch.equal(scales, largest[None] / 448)


@pytest.mark.parametrize("zero", [0.0, -0.0, 1e-30])
def test_a_block_of_zeros_has_a_scale_of_its_own(zero):
    weight = torch.full((130, 128), zero)
    weight[:128] = 3.0
    codes, scales = FP8_BLOCK.quantise(weight)
    assert torch.equal(scales, torch.tensor([[3.0], [1e-10]]) / 448)
    assert torch.equal(FP8_BLOCK.dequantise(codes, scales, FP32)[128:].abs(), torch.zeros(2, 128))


@given(seed=SEEDS, shape=SHAPES, exponent=st.integers(-20, 20))
@settings(max_examples=15, deadline=None)
def test_a_weight_comes_back_within_half_a_step_of_the_format(seed, shape, exponent):
    weight = random_weight(seed, shape, BF16, exponent)
    codes, scales = FP8_BLOCK.quantise(weight)
    steps = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    # Half of the last of three mantissa bits; below 2**-6 scales, of a subnormal's. Then float32's own rounding.
    bound = torch.maximum(weight.double().abs() / 16, steps * 2.0**-10) * (1 + 2.0**-20)
    for dtype, rounding in ((FP32, 0.0), (BF16, 2.0**-8)):
        back = FP8_BLOCK.dequantise(codes, scales, dtype).double()
        assert ((back - weight.double()).abs() <= bound + rounding * back.abs()).all()


def test_weights_of_a_live_model_are_quantised():
    weight = torch.nn.Parameter(random_weight(2, (200, 200), FP32))
    codes, scales = FP8_BLOCK.quantise(weight)
    dequantise_into(codes, scales, weight)
    assert torch.equal(weight, FP8_BLOCK.dequantise(codes, scales, FP32))


def test_rows_and_columns_of_blocks_are_quantised_as_in_the_whole():
    weight = random_weight(1, (300, 500), BF16)
    codes, scales = FP8_BLOCK.quantise(weight)
    files = torch.zeros(300, 500, dtype=torch.uint8).view(FP8), torch.zeros(3, 4)
    for rows, blocks in ((slice(0, 256), slice(0, 2)), (slice(256, 300), slice(2, 3))):
        quantise_into(weight[rows, :256], files[0][rows, :256], files[1][blocks, :2])
        quantise_into(weight[rows, 256:], files[0][rows, 256:], files[1][blocks, 2:])
    assert torch.equal(files[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(files[1], scales)


@given(seed=SEEDS, shape=SHAPES, data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_box_has_the_values_of_float64_rounded_to_float32(seed, shape, data):
    codes, scales = random_codes(seed, shape), random_scales(seed, shape)
    starts = [data.draw(st.integers(0, side - 1)) for side in shape]
    stops = [data.draw(st.integers(start, side)) for start, side in zip(starts, shape, strict=True)]
    box = tuple(map(slice, starts, stops))
    expected = reference_dequantise(codes, scales)[box]
    single = torch.zeros(shape[1] + 3, shape[0] + 2).t()[box]
    half = torch.zeros(shape[0], 2 * shape[1], dtype=BF16)[:, ::2][box]
    for out in (single, half):
        dequantise_into(codes[box], scales, out, row_start=starts[0], column_start=starts[1])
    assert same_bits(single, expected)
    assert same_bits(half, to_bfloat16_bits(expected))


@pytest.mark.parametrize("scale", [1.0, 2.0**-149, 2.0**119, 0.0, 0.007])
def test_every_code_has_its_value(scale):
    codes = torch.tensor([code for code in range(256) if code not in NAN_CODES], dtype=torch.uint8).view(FP8)[None]
    scales = torch.full((1, 2), scale)
    assert same_bits(FP8_BLOCK.dequantise(codes, scales, FP32), reference_dequantise(codes, scales))


def test_scales_may_be_in_bfloat16_and_matrices_wide():
    codes, scales = random_codes(3, (140, 8400)), random_scales(3, (140, 8400)).to(BF16)
    assert same_bits(FP8_BLOCK.dequantise(codes, scales, FP32), reference_dequantise(codes, scales.to(FP32)))


@given(rows=st.integers(0, 3000), columns=st.integers(0, 20000), row_start=st.integers(0, 500))
@settings(max_examples=50, deadline=None)
def test_tiles_cover_a_box_once_and_are_small(rows, columns, row_start):
    count = np.zeros((rows, -(-columns // 128)), np.int8)
    for tile in tiles((rows, columns), row_start):
        blocks, height, width = tile.shape
        assert tile.rows.stop - tile.rows.start == blocks * height
        assert tile.columns.start % 128 == 0
        assert width <= columns
        assert tile.elements <= 2**20
        first, last = row_start + tile.rows.start, row_start + tile.rows.stop - 1
        assert last // 128 - first // 128 == blocks - 1
        count[tile.rows, tile.columns.start // 128 : -(-tile.columns.stop // 128)] += 1
    assert (count == 1).all()


@pytest.mark.parametrize(
    ("largest", "scale", "code"),
    [
        (448, 1, 448),
        (896, 2, 448),
        (448.0001, 1, 448),
        (464, 1, 448),
        (464.0001, 2, 240),
        (224, 0.5, 448),
        (1e-4, 2**-22, 416),
        (228 * 2**-22, 2**-22, 224),
        (1e-9, 2**-22, 2**-8),
        (0, 2**-22, 0),
    ],
)
def test_a_scale_that_is_a_power_of_two_is_the_least_for_the_largest_code(largest, scale, code):
    codes, scales = FP8_BLOCK_UE8M0.quantise(torch.full((1, 1), float(largest)))
    assert (scales.item(), codes.float().item()) == (scale, code)
