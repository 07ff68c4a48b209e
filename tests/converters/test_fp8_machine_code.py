"""Block FP8 in machine code and in torch: the same bits, whatever lies in memory and however it is cut."""

import sys

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from converters.fp8 import LARGEST_WEIGHT, Scratch, compiled_dequantise, compiled_quantise, scales_shape
from converters.fp8.dequantise import _in_torch as dequantised_in_torch
from converters.fp8.quantise import _in_torch as quantised_in_torch

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
INTEGERS = {BF16: torch.int16, FP32: torch.int32}
SIDES = st.integers(1, 300)
WIDTHS = st.integers(1, 300) | st.integers(1, 6).map(lambda blocks: 128 * blocks) | st.integers(500, 900)


def random_bits(seed: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of every exponent, subnormal ones too, whose blocks have some of the largest, or only smaller ones."""
    generator = torch.Generator().manual_seed(seed)
    limits = torch.iinfo(INTEGERS[dtype])
    bits = torch.randint(limits.min, limits.max + 1, shape, generator=generator, dtype=torch.int64)
    weight = bits.to(INTEGERS[dtype]).view(dtype).nan_to_num(nan=0.0, posinf=0.0, neginf=-0.0)
    # Most of these are far apart; in half of the cases they are brought near to each other.
    if seed % 2:
        weight = weight.abs().pow(2.0 ** -(seed % 9)).copysign(weight)
    return weight.clamp(-LARGEST_WEIGHT, LARGEST_WEIGHT)


def inside(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """A matrix within a larger one, whose rows begin at no multiple of a vector."""
    rows, columns = shape
    size = dtype.itemsize
    memory = torch.zeros((rows + 1) * (columns + 3) * size + size, dtype=torch.uint8)
    return memory[size:].view(dtype).view(rows + 1, columns + 3)[1:, 1 : columns + 1]


def aligned(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """A matrix that begins with a line of the caches."""
    return torch.zeros(shape, dtype=FP32).to(dtype)


@pytest.fixture(params=["looked up", "computed"])
def on_each_processor(request, monkeypatch):
    """The code of processors that look bytes up, if this is one, and of those that do not."""
    compiled_quantise._function.cache_clear()
    if request.param == "computed":
        monkeypatch.setattr(compiled_quantise, "processor_has", lambda _feature: False)
    yield
    compiled_quantise._function.cache_clear()


@pytest.mark.usefixtures("on_each_processor")
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("place", [inside, aligned])
@given(seed=st.integers(0, 2**31), shape=st.tuples(SIDES, WIDTHS), dtype=st.sampled_from([BF16, FP32]))
@example(seed=1, shape=(129, 193), dtype=BF16)
@example(seed=2, shape=(257, 1024), dtype=BF16)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_codes_and_scales_are_those_of_torch(power_of_two, place, seed, shape, dtype):
    weight = place(shape, dtype).copy_(random_bits(seed, shape, dtype))
    found, expected = ((place(shape, FP8), place(scales_shape(shape), FP32)) for _ in range(2))
    assert compiled_quantise.knows(weight, *found)
    assert compiled_quantise.quantise(weight, *found, power_of_two=power_of_two)
    quantised_in_torch(weight, *expected, power_of_two, Scratch())
    for one, other in zip(found, expected, strict=True):
        # With what surrounds them, where nothing may be written.
        assert torch.equal(memory_of(one), memory_of(other))


@pytest.mark.parametrize("power_of_two", [False, True])
@given(largest=st.floats(2.0**-30, 2.0**30, width=32), seed=st.integers(0, 2**31))
@example(largest=448.0, seed=0)
@settings(max_examples=40, deadline=None)
def test_in_the_middle_between_two_codes_and_beside_it_a_code_is_that_of_the_quotient(power_of_two, largest, seed):
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middles = torch.cat([codes, (codes[1:] + codes[:-1]) / 2]) * (torch.tensor(largest) / 448)
    # As numbers of whole floats, of which some lie to each side.
    near = (middles.view(torch.int32)[:, None] + torch.arange(-6, 7, dtype=torch.int32)).clamp(min=0).view(FP32)
    mixed = near.flatten()[torch.randperm(near.numel(), generator=torch.Generator().manual_seed(seed))]
    weight = torch.zeros(128, 128)
    weight.view(-1)[: len(mixed)] = mixed.clamp(max=largest)
    weight[127, 127] = -largest
    found, expected = ((torch.zeros(128, 128).to(FP8), torch.zeros(1, 1)) for _ in range(2))
    assert compiled_quantise.quantise(weight, *found, power_of_two=power_of_two)
    quantised_in_torch(weight, *expected, power_of_two, Scratch())
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(memory_of(one), memory_of(other))


@pytest.mark.usefixtures("on_each_processor")
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("largest", [1.0, 1.0078125, 1.3359375, 1.75, 1.9921875])
def test_every_bfloat16_has_the_code_of_torch(largest, power_of_two):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(BF16)
    weight = every[every.abs() <= largest].repeat(2)[: 2**15].view(128, 256).clone()
    weight[0, ::128] = largest
    found, expected = ((torch.zeros(128, 256).to(FP8), torch.zeros(1, 2)) for _ in range(2))
    assert compiled_quantise.quantise(weight, *found, power_of_two=power_of_two)
    quantised_in_torch(weight, *expected, power_of_two, Scratch())
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(memory_of(one), memory_of(other))


@given(seed=st.integers(0, 2**31), shape=st.tuples(SIDES, SIDES), dtype=st.sampled_from([BF16, FP32]), data=st.data())
@settings(max_examples=25, deadline=None)
def test_values_are_those_of_torch(seed, shape, dtype, data):
    generator = torch.Generator().manual_seed(seed)
    start = data.draw(st.tuples(st.integers(0, 300), st.integers(0, 300)))
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    codes = inside(shape, FP8).copy_(raw.masked_fill(raw & 0x7F == 0x7F, 0x80).view(FP8))
    blocks = scales_shape((start[0] % 128 + shape[0], start[1] % 128 + shape[1]))
    scales = torch.randn(blocks, generator=generator) * torch.exp2(
        torch.randint(-149, 110, blocks, generator=generator)
    )
    found, expected = inside(shape, dtype), inside(shape, dtype)
    assert compiled_dequantise.knows(codes, found)
    assert compiled_dequantise.dequantise(codes, scales, found, *start)
    dequantised_in_torch(codes, scales, expected, *start, Scratch())
    assert torch.equal(memory_of(found), memory_of(expected))


def test_several_threads_write_what_one_writes():
    weight = torch.randn(128 * 25 + 7, 2048, generator=torch.Generator().manual_seed(0))
    results = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        codes, scales = torch.zeros(weight.shape, dtype=FP8), torch.zeros(scales_shape(tuple(weight.shape)))
        compiled_quantise.quantise(weight, codes, scales, power_of_two=False)
        results.append((codes.view(torch.uint8), scales))
    torch.set_num_threads(before)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("on_each_processor")
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -3.2e38])
@pytest.mark.parametrize("column", [0, 140, 300, 599])
def test_a_weight_without_a_code_is_found_in_a_vector_and_beside_one(dtype, value, column):
    columns = 141 if column < 141 else 600
    weight = torch.zeros(200, columns, dtype=dtype)
    weight[199, column] = value
    codes, scales = torch.empty(200, columns, dtype=FP8), torch.empty(scales_shape((200, columns)))
    assert not compiled_quantise.quantise(weight, codes, scales, power_of_two=False)


def test_whoever_looks_through_all_modules_can_look_through_its_own():
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith("llvmlite")]
    values = [value for module in modules for value in module.values() if hasattr(value, "__dict__")]
    assert len(values) > 100
    assert not any(vars(value).get("kernel") for value in values)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
