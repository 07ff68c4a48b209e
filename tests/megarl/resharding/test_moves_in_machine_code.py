"""Moves in machine code: the bytes that torch copies, and zlib's checksum of the whole bucket, in any vectors."""

import zlib
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import Box, Matrix, block, boxes, elsewhere, in_all, in_block_fp8

from converters.number_formats import FP8_BLOCK
from megarl.resharding.kernels import Block, gather, rule_of, scatter
from megarl.resharding.kernels.compiled_move import move, move_with_checksum, pack_and_quantise
from megarl.resharding.kernels.crc32 import known_lanes
from megarl.resharding.kernels.moves import Moves, table_of_rows

SEEDS = st.integers(0, 2**32 - 1)
BYTES = Box((3, 1000), torch.uint8, torch.uint8, 0, 1, False)
LANES = pytest.mark.parametrize("lanes", known_lanes())


QUANTISED = Matrix((130, 136), torch.bfloat16, 1, FP8_BLOCK, 0.02)


def contents(found: Block) -> bytes:
    return found.memory.numpy().tobytes()


def random_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(st.lists(boxes(), max_size=3), SEEDS, SEEDS)
@settings(deadline=None)
def test_boxes_of_any_strides_are_as_torch_copies_them(copied, seed, before):
    found, expected = (block(copied, [], seed, padding=3) for _ in range(2))
    total = gather(found, before)
    for there, here in zip(expected.packed, expected.local, strict=True):
        there.copy_(here)
    assert torch.equal(found.memory, expected.memory)
    assert total == zlib.crc32(contents(expected), before)

    found, expected = elsewhere(found), elsewhere(expected)
    assert scatter(found, before) == total
    for there, here in zip(expected.packed, expected.local, strict=True):
        here.copy_(there)
    for one, other in zip(in_all(found), in_all(expected), strict=True):
        assert torch.equal(one, other)
    again = elsewhere(found)
    assert scatter(again, None) is None
    for one, other in zip(in_all(again), in_all(expected), strict=True):
        assert torch.equal(one, other)


@LANES
@given(
    rows=st.integers(1, 5),
    row_bytes=st.integers(2, 1500) | st.integers(1, 20).map(lambda count: 64 * count),
    gap=st.integers(0, 70) | st.just(64),
    starts=st.tuples(*[st.integers(0, 65) | st.just(0)] * 3),
    seed=SEEDS,
)
@example(rows=3, row_bytes=832, gap=64, starts=(0, 0, 0), seed=0)
@settings(deadline=None)
def test_rows_of_any_length_at_any_address_in_vectors_of_any_width(lanes, rows, row_bytes, gap, starts, seed):
    head, tail, shift = starts
    own = random_bytes(rows * (row_bytes + gap) + 64 + shift, seed)
    local = own[-(own.data_ptr() % -64) + shift :][: rows * (row_bytes + gap)].view(rows, -1)[:, :row_bytes]
    size = rows * row_bytes
    bucket = random_bytes(head + size + tail, seed + 1)
    expected = torch.cat([bucket[:head], local.reshape(-1), bucket[head + size :]])
    moves = Moves.of(table_of_rows(bucket, [bucket[head : head + size].view(rows, row_bytes)], [local]), bucket)
    checksum = zlib.crc32(expected.numpy().tobytes(), seed)
    assert move_with_checksum("pack", moves, seed, lanes) == checksum
    assert torch.equal(bucket, expected)

    before = own.clone()
    local.fill_(7)
    surrounded = own.clone()
    assert move_with_checksum("unpack", moves, seed, lanes) == checksum
    assert torch.equal(own, before)
    local.fill_(7)
    assert torch.equal(own, surrounded)
    move("unpack", moves)
    assert torch.equal(own, before)


@LANES
@pytest.mark.parametrize("size", [0, 1, 15, 16, 63, 64, 255, 256, 257, 1023, 4096, 65536 + 1])
def test_the_checksum_of_memory_alone_begins_with_any_other(lanes, size):
    memory = random_bytes(size, size)
    moves = Moves.of(table_of_rows(memory, [], []), memory)
    for before in (0, 1, 2**32 - 1, 0x12345678):
        found = move_with_checksum("unpack", moves, before, lanes)
        assert found == zlib.crc32(memory.numpy().tobytes(), before)


def test_a_tensor_in_another_type_is_converted_among_others():
    box = replace(BYTES, local=torch.bfloat16, packed=torch.float32, shape=(5, 9))
    found = block([BYTES, box, BYTES], [], 1)
    assert gather(found, 0) == zlib.crc32(contents(found))
    assert torch.equal(found.packed[1].view(torch.int32), found.local[1].float().view(torch.int32))


@LANES
@given(st.lists(boxes(), max_size=2), st.lists(in_block_fp8, min_size=1, max_size=3), SEEDS, SEEDS)
@example([BYTES], [QUANTISED, replace(QUANTISED, shape=(300, 640))], 0, 1)
@settings(deadline=None)
def test_matrices_become_codes_between_rows_that_are_moved(lanes, copied, quantised, seed, before):
    found, expected = (block(copied, quantised, seed, padding=3) for _ in range(2))
    assert found.rule is not None
    for there, here in zip(*expected.conversions, strict=True):
        there.copy_(here)
    found.memory.copy_(expected.memory)
    move("pack", expected.moves)
    known = [rule_of(each) == expected.rule for each in expected.quantised]
    for each, is_known in zip(expected.quantised, known, strict=True):
        if is_known:
            each.quantise()
    largest = pack_and_quantise(found.moves_and_matrices, found.rule, before, lanes)
    assert largest == (zlib.crc32(contents(expected), before), True)
    assert torch.equal(found.memory, expected.memory)


@LANES
@given(
    head=st.integers(0, 2).map(lambda steps: 256 * steps) | st.integers(0, 300),
    sizes=st.lists(
        st.tuples(st.integers(1, 400), st.integers(1, 4).map(lambda pairs: 256 * pairs)), min_size=1, max_size=3
    ),
    seed=SEEDS,
    before=SEEDS,
)
@example(head=0, sizes=[(128, 256)], seed=0, before=0)
@example(head=512, sizes=[(385, 1024), (129, 512)], seed=1, before=7)
@settings(max_examples=20, deadline=None)
def test_the_checksum_of_codes_in_registers_is_that_of_their_bytes(lanes, head, sizes, seed, before):
    copied = [replace(BYTES, shape=(1, head))] if head else []
    found = block(copied, [replace(QUANTISED, shape=shape, start=0) for shape in sizes], seed)
    total, has_codes = pack_and_quantise(found.moves_and_matrices, found.rule, before, lanes)
    assert has_codes
    codes = [each.codes.clone() for each in found.quantised]
    for each in found.quantised:
        each.quantise()
    assert total == zlib.crc32(contents(found), before)
    for one, each in zip(codes, found.quantised, strict=True):
        assert torch.equal(one.view(torch.uint8), each.codes.view(torch.uint8))


@pytest.mark.parametrize("before", [None, 5])
def test_a_weight_without_a_code_is_named_in_a_table_of_several(before):
    found = block([BYTES], [QUANTISED, replace(QUANTISED, shape=(300, 640))])
    found.quantised[1].local[299, 200] = torch.nan
    with pytest.raises(ValueError, match="matrix 1: block 2, 1 holds a weight that is NaN"):
        gather(found, before)
