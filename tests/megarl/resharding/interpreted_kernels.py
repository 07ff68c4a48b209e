"""The kernel of a GPU under Triton's interpreter, bit for bit beside that of the host.

Run by `test_interpreted_kernels`: Triton is interpreted where TRITON_INTERPRET is set before it is imported, so in a
process of its own.
"""

import os

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    NOT_HELD,
    Box,
    Matrix,
    block,
    boxes,
    counted,
    elsewhere,
    in_all,
    in_block_fp8,
    in_int8,
    in_mxfp8,
    places,
    put,
    weighted_sum,
)

from converters.fp8 import LARGEST_WEIGHT
from converters.number_formats import FP8_BLOCK, FP8_BLOCK_UE8M0, INT8_CHANNEL, MXFP8
from megarl.resharding.kernels import Block, first_launch, host, on_gpu

SEEDS = st.integers(0, 2**32 - 1)
# Few, and not shrunk: an example takes the interpreter long.
generated = settings(max_examples=int(os.environ.get("EXAMPLES", "2")), phases=(Phase.explicit, Phase.generate))
PLAIN = Matrix((1, 136), torch.bfloat16, 0, FP8_BLOCK, 1.0)
CORNER = [(0.0, 0.0)]


def assert_same_as_on_the_host(copied, quantised, seed):
    found, expected = (block(copied, quantised, seed, padding=padding) for padding in (1, 2))
    assert on_gpu.gather(found, seed) == weighted_sum(found, seed)
    host.gather(expected, None)
    assert torch.equal(counted(found), counted(expected))
    for each in found.quantised:
        codes, scales = each.number_format.quantise(each.local)
        assert torch.equal(codes.view(torch.uint8), each.codes.view(torch.uint8))
        assert torch.equal(scales, each.scales)

    found, expected = elsewhere(found), elsewhere(expected)
    assert on_gpu.scatter(found, seed) == weighted_sum(found, seed)
    host.scatter(expected, None)
    for one, other in zip(in_all(found), in_all(expected), strict=True):
        assert torch.equal(one, other)


@generated
@given(st.lists(boxes(), min_size=1, max_size=3), SEEDS)
def test_copies_of_any_strides(copied, seed):
    assert_same_as_on_the_host(copied, [], seed)


@pytest.mark.parametrize("matrices", [in_block_fp8, in_mxfp8, in_int8], ids=["block_fp8", "mxfp8", "int8"])
def test_quantised_matrices_of_any_numbers(matrices):
    @generated
    @given(st.lists(boxes(), max_size=1), matrices, SEEDS)
    def are_as_on_the_host(copied, matrix, seed):
        assert_same_as_on_the_host(copied, [matrix], seed)

    are_as_on_the_host()


def refusal(move, found):
    """The words in which the second matrix is refused."""
    with pytest.raises(ValueError, match="matrix 1") as error:
        move(found, 3)
    return str(error.value)


@generated
@given(in_block_fp8, places, st.permutations(NOT_HELD), SEEDS)
@example(PLAIN, CORNER, [-torch.inf], 0)
def test_weights_that_no_code_holds_are_refused_as_on_the_host_and_by_torch(matrix, where, values, seed):
    found = block([], [PLAIN, matrix], seed)
    (_, bad) = found.quantised
    put(bad.local, where, values)
    with pytest.raises(ValueError, match="NaN, infinite or too large") as of_torch:
        bad.number_format.quantise(bad.local)
    assert refusal(on_gpu.gather, found) == refusal(host.gather, found) == f"matrix 1: {of_torch.value}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearest(dtype):
    found = block([], [Matrix((8, 128), dtype, 0, FP8_BLOCK, 0.0)])
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(limit)) for limit in (0.0, 448.0)]
    values = torch.cat([codes, middles, *beside])
    found.quantised[0].local.view(-1)[: 2 * len(values)] = torch.cat([values, -values]).to(dtype)
    on_gpu.gather(found, None)
    expected, scales = FP8_BLOCK.quantise(found.quantised[0].local)
    assert scales.tolist() == [[1.0]] == found.quantised[0].scales.tolist()
    assert torch.equal(found.quantised[0].codes.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("number_format", [INT8_CHANNEL, MXFP8], ids=lambda each: each.name)
def test_a_second_number_format_of_a_block_is_made_in_torch_and_counted(number_format):
    small = Matrix((3, 64), torch.bfloat16, 64, number_format, 0.02)
    assert_same_as_on_the_host([Box((3, 5), torch.float32, torch.float32, 0, 1, False)], [PLAIN, small], 5)


@pytest.mark.parametrize("number_format", [INT8_CHANNEL, MXFP8], ids=lambda each: each.name)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_a_row_or_a_block_cannot_hold_is_named(number_format, value):
    found = block([], [Matrix((3, 64), torch.bfloat16, 64, number_format, 0.02)])
    found.quantised[0].local[1, 3] = value
    with pytest.raises(ValueError, match=r"matrix 0: (row 1|block 1, 0) holds a weight that is NaN"):
        on_gpu.gather(found, None)


def test_many_tiles_of_a_box_larger_than_a_program_moves():
    assert_same_as_on_the_host([Box((70, 999), torch.bfloat16, torch.bfloat16, 1, 1, False)], [], 0)


def test_without_a_checksum_the_same_is_moved():
    found, expected = (block([Box((3, 5), torch.float32, torch.float32, 0, 1, False)], []) for _ in range(2))
    assert on_gpu.gather(found, None) is host.gather(expected, None) is None
    assert torch.equal(found.memory, expected.memory)


def test_codes_and_scales_that_stay_so_are_counted_as_where_they_were_made():
    found = block([], [Matrix((130, 256), torch.bfloat16, 0, FP8_BLOCK, 1.0), PLAIN])
    packed = [part for each in found.quantised for part in (each.codes, each.scales)]
    local = [torch.zeros_like(part) for part in packed]
    sent = on_gpu.gather(found, 7)
    assert on_gpu.scatter(Block(found.memory, packed, local, ["codes", "scales"] * 2), 7) == sent
    for here, there in zip(local, packed, strict=True):
        assert torch.equal(here.view(torch.uint8), there.view(torch.uint8))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, LARGEST_WEIGHT * 1.01])
@pytest.mark.parametrize("kernels", [host, on_gpu])
def test_a_weight_that_fp8_cannot_hold_is_named_with_its_block(kernels, value):
    found = block([], [PLAIN, PLAIN])
    found.quantised[1].local[0, 130] = value
    with pytest.raises(ValueError, match=r"block 0, 1 .*NaN, infinite or too large") as error:
        kernels.gather(found, 0)
    assert "matrix 1" in str(error.value)


@pytest.fixture
def launches(monkeypatch):
    """The constants and the options by which Triton compiles what is launched: one kernel for each."""
    found, launch = set(), on_gpu.move

    class Move:
        def __getitem__(self, grid):
            def call(table, row_of_tile, results, *constants, **options):
                found.add((*constants, *sorted(options.items())))
                return launch[grid](table, row_of_tile, results, *constants, **options)

            return call

    monkeypatch.setattr(on_gpu, "move", Move())
    monkeypatch.setattr(first_launch, "gather", on_gpu.gather)
    monkeypatch.setattr(first_launch, "scatter", on_gpu.scatter)
    return found


# The type is none of the constants, so that each with one of the two suffices.
@pytest.mark.parametrize(("before", "dtype"), [(None, torch.bfloat16), (7, torch.float32)])
@pytest.mark.parametrize("number_format", [None, FP8_BLOCK, FP8_BLOCK_UE8M0, INT8_CHANNEL, MXFP8])
def test_a_first_launch_is_of_the_kernels_of_a_refit(launches, before, number_format, dtype):
    made = None if number_format is None else (number_format, dtype)
    first_launch.launch_gather(made, with_checksum=before is not None)
    first_launch.launch_scatter(with_checksum=before is not None)
    of_first = set(launches)
    launches.clear()
    copied = [
        Box((3, 5), torch.bfloat16, torch.bfloat16, 1, 2, True),
        Box((4, 8), torch.int64, torch.int64, 0, 1, False),
    ]
    quantised = [] if made is None else [Matrix((100, 136), dtype, 1, number_format, 0.02)]
    sent = block(copied, quantised)
    on_gpu.gather(sent, before)
    on_gpu.scatter(elsewhere(sent), before)
    assert of_first == launches
    assert len(launches) == 2
